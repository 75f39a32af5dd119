"""QSA block selection against a float64 reading of the specification; all implementations agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridjax.batch import TILE
from hybridjax.ops import SharedBlocks, index_selection, select_index_blocks
from hybridjax.ops.dispatch import assume

choose_by_sorting, choose_by_threshold = (
    jax.jit(choose, static_argnames=("block_size", "top_k"))
    for choose in (index_selection.choose_by_sorting, index_selection.choose_by_threshold)
)
HEADS, WIDTH, PAGE = 3, 6, 64
IMPLEMENTATIONS = ["reference", "xla_tiled", "xla_threshold", "xla_causal"]


def oracle(q, keys, position, ratio, top_k):
    """Listed blocks of one query: q [Hi, Di], keys [complete blocks, Di]."""
    complete = (position + 1) // ratio
    scores = np.maximum(np.asarray(q, np.float64) @ np.asarray(keys[:complete], np.float64).T, 0).sum(0)
    order = sorted(range(complete), key=lambda b: (-scores[b], b))
    return sorted(order[:top_k]) + ([complete] if (position + 1) % ratio else [])


class Indexed:
    """Index keys of small integers (scores are exact, ties common) scattered over NaN-filled pages."""

    def __init__(self, lengths, ratio, seed=0, columns=None):
        rng = np.random.default_rng(seed)
        self.keys = [rng.integers(-2, 3, (n // ratio, WIDTH)).astype(np.float32) for n in lengths]
        counts = [-(-n // PAGE) for n in lengths]
        free = list(rng.permutation(np.arange(1, sum(counts) + 3)))
        self.table = np.zeros((len(lengths), columns or max(counts)), np.int32)
        pool = np.full((sum(counts) + 3, PAGE // ratio, WIDTH), np.nan, np.float32)
        for s, keys in enumerate(self.keys):
            for column in range(counts[s]):
                page = self.table[s, column] = free.pop()
                part = keys[column * PAGE // ratio :][: PAGE // ratio]
                pool[page, : len(part)] = part
        self.pool = jnp.asarray(pool)

    def select(self, q, sequence, positions, **options):
        rows = jnp.asarray(sequence, jnp.int32), jnp.asarray(positions, jnp.int32)
        return np.asarray(select_index_blocks(q, self.pool, jnp.asarray(self.table), *rows, **options))


def queries(rows, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-2, 3, (rows, HEADS, WIDTH)).astype(np.float32))


def listed(ids):
    """The ids of a row, which must stand in front, ascending."""
    ids = np.asarray(ids)
    found = ids[: np.argmax(ids < 0)] if (ids < 0).any() else ids
    assert (ids[len(found) :] == -1).all() and (np.diff(found) > 0).all()
    return found.tolist()


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("implementation", ["reference", "xla_threshold"])
def test_single_queries_around_every_block_border_and_far_beyond_the_budget(ratio, implementation):
    top_k, length = 5, 700
    indexed = Indexed([length], ratio)
    positions = [*range(12 * ratio), 127, 128, 320, 639, 640, 641, 642, 643, 644, 696, 699, -1]
    q = queries(len(positions))
    options = {"block_size": ratio, "top_k": top_k, "implementation": implementation}
    got = indexed.select(q, [0] * len(positions), positions, **options)
    assert got.shape == (len(positions), 1, top_k + 1)
    for i, p in enumerate(positions):
        assert listed(got[i, 0]) == oracle(q[i], indexed.keys[0], p, ratio, top_k)


@pytest.mark.parametrize("ratio", [4, 8])
def test_tiles_of_several_sequences_equal_the_definition(ratio):
    lengths, sequence, positions = [300, 70, 64], [], []
    for s, n in enumerate(lengths):
        padded = -(-n // TILE) * TILE
        sequence += [s] * padded
        positions += [*range(n), *[-1] * (padded - n)]
    indexed = Indexed(lengths, ratio, columns=7)
    q = jnp.where(jnp.array(positions)[:, None, None] < 0, jnp.nan, queries(len(positions)))
    for implementation in IMPLEMENTATIONS:
        options = {"block_size": ratio, "top_k": 6, "tiled": True, "implementation": implementation}
        got = indexed.select(q, sequence, positions, **options)
        for i, (s, p) in enumerate(zip(sequence, positions, strict=True)):
            want = oracle(q[i], indexed.keys[s], p, ratio, 6) if p >= 0 else []
            assert listed(got[i, 0]) == want


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), span=st.sampled_from([0, 1, 3]), ratio=st.sampled_from([4, 8]))
def test_pages_chosen_before_blocks_lose_none(seed, span, ratio):
    """40 pages in ten segments, 6 blocks: scores are all zero, mostly equal, or various."""
    rng = np.random.default_rng(seed)
    tile = int(rng.integers(2, 40))
    length = tile * TILE + int(rng.integers(1, TILE + 1))
    indexed = Indexed([length], ratio, seed, columns=40)
    indexed.pool = jnp.where(jnp.isnan(indexed.pool), jnp.nan, jnp.clip(indexed.pool, -span, span))
    q = jnp.clip(queries(TILE, seed), -span, span)
    positions = [p if p < length else -1 for p in range(tile * TILE, tile * TILE + TILE)]
    options = {"block_size": ratio, "top_k": 6, "tiled": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_selection, "_SEGMENT", 4)
        got = indexed.select(q, [0] * TILE, positions, implementation="xla_causal", **options)
    want = indexed.select(q, [0] * TILE, positions, implementation="xla_tiled", **options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("machine, chosen", [("cpu", "xla_causal"), ("sm_90", "xla_threshold")])
def test_only_a_cpu_chooses_pages_first(machine, chosen):
    with assume(machine):
        assert select_index_blocks.select(tiled=True) == chosen


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_page_table_within_the_budget_lists_all_blocks_unseen(implementation):
    """The keys are NaN everywhere: nothing may be scored."""
    table, positions = jnp.ones((1, 2), jnp.int32), jnp.array([0, 2, 3, 4, 126, 127, *[-1] * 58], jnp.int32)
    got = select_index_blocks(
        jnp.full((TILE, HEADS, WIDTH), jnp.nan),
        jnp.full((3, 16, WIDTH), jnp.nan),
        table,
        jnp.zeros((TILE,), jnp.int32),
        positions,
        block_size=4,
        top_k=32,
        tiled=True,
        implementation=implementation,
    )
    assert got.shape == (TILE, 1, 32)
    for row, p in zip(np.asarray(got[:, 0]), positions.tolist(), strict=True):
        assert listed(row) == list(range(p // 4 + 1))


def test_a_query_may_lose_its_own_complete_block_but_never_its_tail():
    scores = jnp.asarray([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]] * 4)
    got = choose_by_sorting(scores, jnp.array([15, 16, 18, 19]), block_size=4, top_k=2)
    assert [listed(row) for row in got] == [[0, 1], [0, 1, 4], [0, 1, 4], [0, 1]]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["zeros", "few", "floats", "huge", "equal"]),
    top_k=st.sampled_from([1, 3, 16, 39]),
)
def test_the_threshold_search_equals_sorting(seed, kind, top_k):
    rng = np.random.default_rng(seed)
    shape, positions = (6, 40), rng.integers(-1, 160, 6)
    scores = {
        "zeros": np.maximum(rng.standard_normal(shape) - 1.5, 0),
        "few": rng.integers(0, 3, shape).astype(float),
        "floats": rng.random(shape),
        "huge": np.exp(rng.normal(0, 25, shape)),
        "equal": np.full(shape, rng.random()),
    }[kind].astype(np.float32)
    scores[np.arange(40) >= ((positions + 1) // 4)[:, None]] = rng.choice([np.nan, np.inf, 7.0])
    arguments = jnp.asarray(scores), jnp.asarray(positions, jnp.int32)
    want = choose_by_sorting(*arguments, block_size=4, top_k=top_k)
    got = choose_by_threshold(*arguments, block_size=4, top_k=top_k)
    np.testing.assert_array_equal(got, want)


def test_a_context_of_262144_tokens_with_ties_at_the_threshold():
    """512 of 65536 blocks; with mass ties at zero, at one value, and without any."""
    rng = np.random.default_rng(0)
    blocks, top_k = 65536, 512
    scores = np.zeros((4, blocks), np.float32)
    scores[0, rng.choice(blocks, 100, replace=False)] = rng.random(100) + 1
    scores[1] = np.where(rng.random(blocks) < 0.3, 0.25, 0)
    scores[2] = rng.random(blocks)
    positions = np.array([4 * blocks - 1, 4 * blocks - 2, 4 * blocks - 1, 4 * 40000 + 1])
    want = []
    for row, p in zip(scores, positions, strict=True):
        complete = (p + 1) // 4
        best = np.argsort(-row[:complete], kind="stable")[:top_k]
        want.append(sorted(best.tolist()) + ([complete] if (p + 1) % 4 else []))
    for choose in (choose_by_sorting, choose_by_threshold):
        got = choose(jnp.asarray(scores), jnp.asarray(positions, jnp.int32), block_size=4, top_k=top_k)
        assert [listed(row) for row in got] == want


def test_top_k_of_jax_gives_the_lower_index_first():
    """What choose_by_sorting relies on."""
    scores = np.random.default_rng(0).integers(0, 4, (8, 5000)).astype(np.float32)
    _, ids = jax.jit(lambda x: jax.lax.top_k(x, 700))(scores)
    np.testing.assert_array_equal(ids, np.argsort(-scores, axis=1, kind="stable")[:, :700])


@pytest.mark.parametrize("ratio", [4, 8])
def test_a_shared_selection_grows_by_all_later_blocks(ratio):
    steps = 5
    indexed = Indexed([400], ratio)
    captured = np.arange(ratio - 1, 260)
    ids = indexed.select(queries(len(captured)), [0] * len(captured), captured, block_size=ratio, top_k=6)
    shared = SharedBlocks(jnp.asarray(ids), jnp.asarray(captured + 1, jnp.int32), steps)
    for ahead in range(steps + 1):
        got = np.asarray(shared.at(jnp.asarray(captured + ahead, jnp.int32), ratio))[:, 0]
        for row, own, p in zip(got, ids[:, 0], captured, strict=True):
            later = {t // ratio for t in range(p + 1, p + 1 + ahead)}
            assert listed(row) == sorted({*listed(own), *later})
    assert (np.asarray(shared.at(jnp.full(captured.shape, -1, jnp.int32), ratio)) == -1).all()
