"""Block selection and block attention against a brute-force float64 reading of the specification."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridjax.batch import TILE
from hybridjax.configs import SparseConfig
from hybridjax.ops import block_attention, infllm, select_blocks, update_compressed
from hybridjax.ops.dispatch import assume
from hybridjax.ops.infllm import choose_blocks, compress_block

GROUPS, PER_GROUP, WIDTH = 2, 3, 8
SCALE = WIDTH**-0.5
CONFIG = SparseConfig(topk=3, window_size=128, dense_len=0)


def oracle_blocks(q, k, position, config):
    """Selected block ids of one query per K/V head; q [Hq, D], k [L, G, D] (minicpm_sala 3.4, 3.5)."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    length, block = position + 1, config.block_size
    current = position // block
    if length < config.dense_len:
        return [list(range(current + 1))] * GROUPS
    n1, n2 = max(0, (length - 32) // 16 + 1), max(0, (length - 128) // 64 + 1)
    chosen = []
    for g in range(GROUPS):
        k1 = np.array([k[16 * j : 16 * j + 32, g].mean(0) for j in range(n1)]).reshape(n1, WIDTH)
        k2 = np.array([k[64 * i : 64 * i + 128, g].mean(0) for i in range(n2)]).reshape(n2, WIDTH)
        total = np.zeros(n1)
        for head in range(PER_GROUP):
            query = q[g * PER_GROUP + head]
            if n2:
                rough = SCALE * k2 @ query
                total += np.exp(SCALE * k1 @ query - rough.max()) / np.exp(rough - rough.max()).sum()
        scores = []
        for b in range(current + 1):
            touched = [total[j] for j in range(max(0, 4 * b - 1), 4 * b + 4) if j < n1]
            forced = b < config.init_blocks or b >= current - config.window_size // block
            scores.append(np.inf if forced else max(touched, default=-np.inf))
        count = config.topk + config.window_size // block
        order = sorted(range(current + 1), key=lambda b: (-scores[b], b))
        chosen.append(sorted(order[:count]))
    return chosen


def oracle_attention(q, k, v, position, blocks):
    """Softmax over the tokens of the listed blocks up to the query's position, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = []
    for head in range(GROUPS * PER_GROUP):
        g = head // PER_GROUP
        seen = [t for b in blocks[g] for t in range(b * 64, b * 64 + 64) if t <= position]
        score = SCALE * k[seen, g] @ q[head]
        weight = np.exp(score - score.max())
        out.append(weight @ v[seen, g] / weight.sum())
    return np.array(out)


class Cached:
    """Keys and values of sequences scattered over NaN-filled pages in random order."""

    def __init__(self, lengths, seed=0, columns=None):
        rng = np.random.default_rng(seed)
        self.k = [rng.standard_normal((n, GROUPS, WIDTH)).astype(np.float32) for n in lengths]
        self.v = [rng.standard_normal((n, GROUPS, WIDTH)).astype(np.float32) for n in lengths]
        counts = [-(-n // 64) for n in lengths]
        pages = sum(counts) + 3
        free = list(rng.permutation(np.arange(1, pages)))
        columns = columns or max(counts)
        self.table = np.zeros((len(lengths), columns), np.int32)
        keys = np.full((pages, GROUPS, 64, WIDTH), np.nan, np.float32)
        values = keys.copy()
        moved = []
        for s, n in enumerate(lengths):
            for b in range(counts[s]):
                page = self.table[s, b] = free.pop()
                end = min(n, b * 64 + 64) - b * 64
                keys[page, :, :end] = np.moveaxis(self.k[s][b * 64 : b * 64 + end], 0, 1)
                values[page, :, :end] = np.moveaxis(self.v[s][b * 64 : b * 64 + end], 0, 1)
                moved.append((page, self.table[s, b - 1] if b else 0, b, end - 1))
        page, before, block, last = (jnp.asarray(x, jnp.int32) for x in zip(*moved))
        self.keys, self.values, self.table = jnp.asarray(keys), jnp.asarray(values), jnp.asarray(self.table)
        empty = jnp.full((pages, GROUPS, 4, WIDTH), jnp.nan), jnp.full((pages, GROUPS, WIDTH), jnp.nan)
        self.compressed, self.coarse = update_compressed(self.keys, *empty, page, before, block, last)


def queries(count, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((count, GROUPS * PER_GROUP, WIDTH)).astype(np.float32)) * 2


def listed(ids):
    return [[int(b) for b in group if b >= 0] for group in np.asarray(ids)]


def test_compressed_keys_are_means_of_the_windows_that_end_in_the_block():
    keys = np.random.default_rng(0).standard_normal((128, WIDTH)).astype(np.float32)
    fine, wide = compress_block(jnp.asarray(keys[:64]), jnp.asarray(keys[64:]))
    for c in range(4):
        end = 64 + 16 * (c + 1)
        np.testing.assert_allclose(fine[c], keys[end - 32 : end].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(wide, keys.mean(0), rtol=1e-5, atol=1e-6)


def test_only_completed_windows_are_written():
    cached = Cached([150])
    pages = np.asarray(cached.table[0])
    written = ~np.isnan(np.asarray(cached.compressed)[pages]).any(axis=(1, 3))
    assert written.tolist() == [[False, True, True, True], [True] * 4, [True, False, False, False]]
    assert (~np.isnan(np.asarray(cached.coarse)[pages]).any(axis=(1, 2))).tolist() == [False, True, False]
    assert np.isnan(np.asarray(cached.compressed)[0]).all()


@settings(max_examples=15)
@given(length=st.integers(1, 900), seed=st.integers(0, 99), dense_len=st.sampled_from([0, 400, 2000]))
def test_selected_blocks_equal_the_brute_force(length, seed, dense_len):
    config = SparseConfig(topk=3, window_size=128, dense_len=dense_len)
    cached = Cached([length], seed, columns=15)
    q = queries(1, seed + 1)
    got = select_blocks(
        q,
        cached.compressed,
        cached.coarse,
        cached.table,
        jnp.zeros((1,), jnp.int32),
        jnp.array([length - 1], jnp.int32),
        config,
        scale=SCALE,
    )
    assert listed(got[0]) == oracle_blocks(q[0], cached.k[0], length - 1, config)


@pytest.mark.parametrize("boundary", [31, 32, 47, 48, 63, 64, 127, 128, 191, 192, 447, 448])
def test_selection_around_window_and_block_borders(boundary):
    cached = Cached([boundary + 2], columns=8)
    q = queries(3)
    positions = jnp.array([boundary - 1, boundary, boundary + 1], jnp.int32)
    sequence = jnp.zeros((3,), jnp.int32)
    arguments = (q, cached.compressed, cached.coarse, cached.table, sequence, positions, CONFIG)
    got = select_blocks(*arguments, scale=SCALE)
    for i, position in enumerate(positions.tolist()):
        assert listed(got[i]) == oracle_blocks(q[i], cached.k[0], position, CONFIG)


def test_ties_go_to_the_smaller_block_and_forced_blocks_are_kept():
    scores = jnp.zeros((1, 1, 12), jnp.float32)
    got = choose_blocks(scores, jnp.array([64 * 10 + 5], jnp.int32), CONFIG)
    assert listed(got[0]) == [[0, 1, 8, 9, 10]]


def test_a_padding_row_lists_nothing():
    got = choose_blocks(jnp.zeros((1, 1, 12)), jnp.array([-1], jnp.int32), CONFIG)
    assert listed(got[0]) == [[]]


def tiled_rows(lengths):
    """Rows in tiles of 64 covering whole sequences: row_sequence, positions, and rows per sequence."""
    sequence, positions, rows = [], [], []
    for s, n in enumerate(lengths):
        padded = -(-n // TILE) * TILE
        rows.append(len(positions) + np.arange(n))
        sequence += [s] * padded
        positions += [*range(n), *[-1] * (padded - n)]
    return jnp.asarray(sequence, jnp.int32), jnp.asarray(positions, jnp.int32), rows


@pytest.mark.parametrize("segment", [None, 4])
@pytest.mark.parametrize("implementation", ["xla_tiled", "xla_causal"])
def test_tiled_selection_equals_the_row_by_row_definition(implementation, segment, monkeypatch):
    """With segments of 4 blocks there are three, the last one not full, the last two behind some tiles."""
    if segment:
        monkeypatch.setattr(infllm, "_SEGMENT", segment)
    lengths = [700, 130, 64]
    cached = Cached(lengths)
    sequence, positions, _ = tiled_rows(lengths)
    q = queries(len(positions))
    arguments = (q, cached.compressed, cached.coarse, cached.table, sequence, positions, CONFIG)
    want = select_blocks(*arguments, scale=SCALE, tiled=True, implementation="reference")
    got = select_blocks(*arguments, scale=SCALE, tiled=True, implementation=implementation)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("machine, chosen", [("cpu", "xla_causal"), ("sm_90", "xla_tiled")])
def test_only_a_cpu_walks_segments(machine, chosen):
    with assume(machine):
        assert select_blocks.select(tiled=True) == chosen


def test_scores_by_segments_do_not_depend_on_the_page_table(monkeypatch):
    monkeypatch.setattr(infllm, "_SEGMENT", 4)
    length = 64 * 9
    cached, wide = Cached([length]), Cached([length], columns=24)
    positions, q = jnp.arange(length - TILE, length, dtype=jnp.int32), queries(TILE)

    def scores(c, columns):
        table = jnp.pad(c.table[0], (0, columns - c.table.shape[1]))
        return infllm._tile_scores(c.compressed, c.coarse, 4, 64, SCALE, q, table, positions)

    got = scores(cached, 12)
    whole = infllm.block_scores(
        q,
        cached.compressed[cached.table[0]],
        cached.coarse[cached.table[0]],
        positions,
        block_size=64,
        scale=SCALE,
    )
    np.testing.assert_allclose(got[..., :9], whole, rtol=1e-5)
    np.testing.assert_array_equal(got, scores(wide, 24)[..., :12])
    assert np.isneginf(scores(wide, 24)[..., 9:]).all()


@pytest.mark.parametrize("implementation", ["reference", "xla_tiled"])
def test_attention_equals_float64_and_ignores_poisoned_pages(implementation):
    lengths = [300, 100]
    cached = Cached(lengths)
    sequence, positions, rows = tiled_rows(lengths)
    q = queries(len(positions))
    where = (cached.table, sequence, positions)
    ids = select_blocks(q, cached.compressed, cached.coarse, *where, CONFIG, scale=SCALE, tiled=True)
    out = block_attention(
        q, cached.keys, cached.values, *where, ids, scale=SCALE, tiled=True, implementation=implementation
    )
    assert not np.isnan(out).any()
    for s, n in enumerate(lengths):
        for t in {0, 1, 63, 64, 99, n - 1}:
            r = rows[s][t]
            want = oracle_attention(q[r], cached.k[s], cached.v[s], t, listed(ids[r]))
            np.testing.assert_allclose(out[r], want, rtol=2e-5, atol=2e-5)


def test_a_context_of_several_segments_and_a_longer_page_table_change_nothing():
    length = 64 * 40
    cached, wide = Cached([length]), Cached([length], columns=70)
    sequence, positions = jnp.zeros((TILE,), jnp.int32), jnp.arange(length - TILE, length, dtype=jnp.int32)
    q = queries(TILE)
    config = SparseConfig(topk=3, window_size=128, dense_len=10**6)

    def attend(c, implementation):
        where = (c.table, sequence, positions)
        ids = select_blocks(q, c.compressed, c.coarse, *where, config, scale=SCALE, tiled=True)
        return block_attention(
            q, c.keys, c.values, *where, ids, scale=SCALE, tiled=True, implementation=implementation
        )

    out = attend(cached, "xla_tiled")
    np.testing.assert_allclose(out, attend(cached, "reference"), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(out, attend(wide, "xla_tiled"))


def test_gradients_of_the_tiled_form_equal_those_of_the_definition():
    cached = Cached([2 * TILE])
    where = (cached.table, jnp.zeros((2 * TILE,), jnp.int32), jnp.arange(2 * TILE, dtype=jnp.int32))
    q = queries(2 * TILE)
    keys, values = (jnp.nan_to_num(x) for x in (cached.keys, cached.values))
    ids = select_blocks(q, cached.compressed, cached.coarse, *where, CONFIG, scale=SCALE, tiled=True)

    def gradient(implementation):
        def loss(q, k, v):
            out = block_attention(
                q, k, v, *where, ids, scale=SCALE, tiled=True, implementation=implementation
            )
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, argnums=(0, 1, 2))(q, keys, values)

    for got, want in zip(gradient("xla_tiled"), gradient("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
