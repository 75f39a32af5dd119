"""Attention over lists of blocks smaller than a page, against float64 over the listed tokens."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.batch import TILE
from hybridjax.ops import block_attention
from hybridjax.ops.dispatch import assume

block_attention_module = importlib.import_module("hybridjax.ops.block_attention")
GROUPS, PER_GROUP, WIDTH, PAGE = 2, 3, 8, 64
SCALE = WIDTH**-0.5
IMPLEMENTATIONS = ["reference", "xla_tiled", "xla_listed"]


class Case:
    """Two sequences in tiles over permuted, NaN-filled pages, each query with random blocks listed."""

    def __init__(self, block, lists, lengths=(300, 100), seed=0):
        rng = np.random.default_rng(seed)
        self.block, counts = block, [-(-n // PAGE) for n in lengths]
        pages = rng.permutation(np.arange(1, sum(counts) + 2))
        table = np.zeros((len(lengths), max(counts) + 1), np.int32)
        pool = np.full((2, sum(counts) + 2, GROUPS, PAGE, WIDTH), np.nan, np.float32)
        self.k = [rng.standard_normal((2, n, GROUPS, WIDTH)).astype(np.float32) for n in lengths]
        sequence, positions = [], []
        for s, n in enumerate(lengths):
            table[s, : counts[s]] = pages[sum(counts[:s]) : sum(counts[: s + 1])]
            for t in range(n):
                pool[:, table[s, t // PAGE], :, t % PAGE] = self.k[s][:, t]
            sequence += [s] * (counts[s] * PAGE)
            positions += [*range(n), *[-1] * (counts[s] * PAGE - n)]
        self.sequence, self.positions = np.array(sequence), np.array(positions)
        rows = len(positions)
        self.q = rng.standard_normal((rows, GROUPS * PER_GROUP, WIDTH)).astype(np.float32)
        self.ids = np.full((rows, lists, max(lengths) // block + 1), -1, np.int32)
        for row, p in enumerate(positions):
            for g in range(lists if p >= 0 else 0):
                mine = np.flatnonzero(rng.random(p // block + 1) < 0.4)
                mine = np.union1d(mine, [rng.integers(p // block + 1)])
                self.ids[row, g, : len(mine)] = mine
        self.keys, self.values = jnp.asarray(pool[0]), jnp.asarray(pool[1])
        self.where = [jnp.asarray(x, jnp.int32) for x in (table, sequence, positions, self.ids)]

    def attend(self, implementation, q=None, **options):
        q = jnp.asarray(self.q) if q is None else q
        options = {"block_size": self.block, "implementation": implementation, **options}
        attend = jax.jit(lambda *arrays: block_attention(*arrays, scale=SCALE, tiled=True, **options))
        return attend(q, self.keys, self.values, *self.where)

    def want(self, row):
        (k, v), p = self.k[self.sequence[row]].astype(np.float64), self.positions[row]
        out = np.zeros((GROUPS * PER_GROUP, WIDTH))
        for head in range(GROUPS * PER_GROUP):
            g = head // PER_GROUP
            ids = self.ids[row, g % self.ids.shape[1]]
            seen = [t for t in range(p + 1) if t // self.block in ids]
            if seen:
                score = SCALE * k[seen, g] @ self.q[row, head].astype(np.float64)
                weight = np.exp(score - score.max())
                out[head] = weight @ v[seen, g] / weight.sum()
        return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block, lists", [(4, 1), (4, 2), (8, 1), (64, 1)])
def test_only_listed_tokens_up_to_the_query_count(block, lists, implementation):
    case = Case(block, lists)
    out = case.attend(implementation)
    for row in range(0, len(case.positions), 3):
        np.testing.assert_allclose(out[row], case.want(row), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_lists_nothing_it_can_see_returns_zeros(implementation):
    case = Case(4, 1)
    case.where[3] = case.where[3].at[5].set(-1).at[6].set(-1).at[6, 0, 0].set(2)  # token 8 is later than 6
    out = case.attend(implementation)
    np.testing.assert_array_equal(out[jnp.array([5, 6])], 0)
    np.testing.assert_array_equal(out[case.positions < 0], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_page_listed_whole_equals_its_blocks_listed_one_by_one(implementation):
    pages = Case(64, 1)
    fine = Case(64, 1)
    ids = pages.where[3][..., None]
    each = jnp.where(ids >= 0, ids * 16 + jnp.arange(16), -1)
    fine.where[3] = each.reshape(*ids.shape[:2], -1)
    out = fine.attend(implementation, block_size=4)
    np.testing.assert_array_equal(out, pages.attend(implementation))
    np.testing.assert_array_equal(out, pages.attend(implementation, block_size=None))


def short_lists(first, columns=40):
    """Four tiles from the given one on, of 2560 tokens in 40 pages; up to 12 blocks of 4 are listed."""
    case = Case(4, 1, lengths=(2560,))
    rows, rng = slice(first * TILE, (first + 4) * TILE), np.random.default_rng(first)
    ids = np.full((4 * TILE, 1, 12), -1, np.int32)
    for i, p in enumerate(range(2560)[rows]):
        mine = np.sort(rng.choice(p // 4 + 1, rng.integers(0, 13), replace=False))
        ids[i, 0, : len(mine)] = mine
    case.q, case.sequence, case.positions, case.ids = (
        case.q[rows],
        case.sequence[rows],
        case.positions[rows],
        ids,
    )
    table = jnp.pad(case.where[0][:, :40], ((0, 0), (0, columns - 40)))
    case.where = [table, *(jnp.asarray(x, jnp.int32) for x in (case.sequence, case.positions, ids))]
    return case


def test_the_listed_form_masks_in_front_and_gathers_behind():
    """Of tiles 30 to 33, two lie in the first 32 pages, which are masked."""
    case = short_lists(30)
    out, tiled = case.attend("xla_listed"), case.attend("xla_tiled")
    for row in range(0, 4 * TILE, 7):
        np.testing.assert_allclose(out[row], case.want(row), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(out[: 2 * TILE], tiled[: 2 * TILE])
    np.testing.assert_array_equal(out[2 * TILE :], case.attend("reference")[2 * TILE :])
    np.testing.assert_array_equal(out, short_lists(30, columns=100).attend("xla_listed"))


@pytest.mark.parametrize("machine, chosen", [("cpu", "xla_listed"), ("sm_90", "xla_tiled")])
def test_only_a_cpu_gathers_for_tiles(machine, chosen):
    with assume(machine):
        assert block_attention.select(tiled=True) == chosen
        assert block_attention.select(tiled=False) == "reference"


def test_the_listed_form_in_small_pieces_changes_little(monkeypatch):
    case = short_lists(34)
    whole = case.attend("xla_listed")
    monkeypatch.setattr(block_attention_module, "_GATHERED_BYTES", 2**16)
    np.testing.assert_allclose(case.attend("xla_listed"), whole, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_listed_form_equal_those_of_the_definition():
    case = short_lists(30)
    kept = [jnp.nan_to_num(x) for x in (case.keys, case.values)]

    def gradient(implementation):
        def loss(q, keys, values):
            case.keys, case.values = keys, values
            return jnp.sum(jnp.sin(case.attend(implementation, q)))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(jnp.asarray(case.q), *kept)

    for got, want in zip(gradient("xla_listed"), gradient("reference"), strict=True):
        assert jnp.abs(want).max() > 0.01
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_small_blocks_over_several_segments_of_the_context():
    """The last 64 queries of 2560 tokens, 640 blocks in 40 pages."""
    case = Case(4, 1, lengths=(2560,))
    case.q, case.where = case.q[-TILE:], [case.where[0], *(x[-TILE:] for x in case.where[1:])]
    out = case.attend("xla_tiled")
    np.testing.assert_allclose(out, case.attend("reference"), rtol=2e-5, atol=2e-5)
    case.sequence, case.positions, case.ids = case.sequence[-TILE:], case.positions[-TILE:], case.ids[-TILE:]
    np.testing.assert_allclose(out[63], case.want(63), rtol=2e-5, atol=2e-5)


def test_gradients_of_the_tiled_form_equal_those_of_the_definition():
    case = Case(4, 1, lengths=(2 * TILE,))
    case.keys, case.values = jnp.nan_to_num(case.keys), jnp.nan_to_num(case.values)

    def gradient(implementation):
        def loss(q, keys, values):
            case.keys, case.values = keys, values
            return jnp.sum(jnp.sin(case.attend(implementation, q)))

        arrays = jnp.asarray(case.q), *kept
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    kept = case.keys, case.values
    for got, want in zip(gradient("xla_tiled"), gradient("reference"), strict=True):
        assert jnp.abs(want).max() > 0.01
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [0, 3, 128])
def test_a_block_that_does_not_divide_the_page_is_refused(block, implementation):
    with pytest.raises(ValueError, match=f"block_size is {block}"):
        Case(4, 1, lengths=(10,)).attend(implementation, block_size=block)
