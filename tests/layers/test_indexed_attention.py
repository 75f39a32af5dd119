"""Indexed attention: against transformers' answers, a float64 reading, and itself under any schedule."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hybridjax.batch import TILE, Batch, IndexedPagedCache, Mode
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp import RopeConfig
from hybridjax.layers import IndexedAttention
from hybridjax.ops import SharedBlocks

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen4_exp" / "indexed_attention.safetensors"
HIDDEN, LENGTH, SEQUENCES, TILES = 24, 256, 3, 4
PAGES, SLOTS = 16, 6


def config_of(ratio, budget, bias=False):
    return Qwen4ExpConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=bias,
        rope_parameters=RopeConfig(rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=(2, 1, 1)),
        layer_types=("indexed_attention",),
        indexer_n_heads=3,
        indexer_head_dim=12,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        ple_layer_ids=(),
        bos_token_id=None,
        eos_token_id=(1,),
    )


@functools.cache
def layer_of(ratio, budget, bias=False, dtype=jnp.float32):
    init = jax.nn.initializers.normal(0.3)
    layer = IndexedAttention(config_of(ratio, budget, bias), init=init, dtype=dtype, rngs=nnx.Rngs(ratio))
    for i, norm in enumerate((layer.q_norm, layer.k_norm, layer.index_q_norm, layer.index_k_norm)):
        norm.weight[...] = (0.3 * jax.random.normal(jax.random.key(i), norm.weight.shape)).astype(dtype)
    return nnx.split(layer)


@functools.partial(jax.jit, static_argnums=0)
def run(definition, parameters, x, batch, cache, shared=None):
    """Output, cache and block ids of one step."""
    seen = {}
    layer = nnx.merge(definition, parameters)
    y, cache = layer(x, batch, cache, seen.__setitem__, shared=shared)
    return y, cache, seen["block_ids"][:, 0]


def tokens_of(row, ratio, position):
    return {t for b in row if b >= 0 for t in range(b * ratio, b * ratio + ratio) if t <= position}


def blocks_of(ids):
    return [{b for b in row if b >= 0} for row in np.asarray(ids).tolist()]


@pytest.mark.parametrize("name, ratio, budget, bias", [("ratio4", 4, 24, False), ("ratio8", 8, 32, True)])
def test_outputs_and_selected_tokens_equal_those_of_transformers(name, ratio, budget, bias):
    """The second case has biases and multimodal rotary positions."""
    golden = {k.removeprefix(name + "."): v for k, v in load_file(GOLDEN).items() if k.startswith(name)}
    definition, parameters = layer_of(ratio, budget, bias)
    layer = nnx.merge(definition, parameters)
    projections = ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj")
    layer.in_proj.weight.value[...] = np.concatenate([golden[p + ".weight"] for p in projections])
    layer.o_proj.weight.value[...] = golden["o_proj.weight"]
    if bias:
        layer.in_bias[...] = np.concatenate([golden[p + ".bias"] for p in projections[:3]])
        layer.o_bias[...] = golden["o_proj.bias"]
    layer.q_norm.weight[...], layer.k_norm.weight[...] = golden["q_norm.weight"], golden["k_norm.weight"]
    layer.index_q_norm.weight[...] = golden["indexer.q_layernorm.weight"]
    layer.index_k_norm.weight[...] = golden["indexer.k_layernorm.weight"]
    length = len(golden["x"])
    padding = ((0, -length % TILE), (0, 0))
    rope = jnp.asarray(np.pad(golden["rope"], padding))
    batch = dataclasses.replace(Batch.whole(jnp.zeros((1, length), jnp.int32)), rope_positions=rope)
    x = jnp.asarray(np.pad(golden["x"], padding, constant_values=np.nan))
    y, _, ids = run(*nnx.split(layer), x, batch, None)
    np.testing.assert_allclose(y[:length], golden["y"], rtol=2e-5, atol=2e-5)
    want = np.unpackbits(golden["selected"], axis=1)[:, :length]
    assert want[-1].sum() < length - 3
    for p in range(length):
        assert tokens_of(np.asarray(ids[p]), ratio, p) == set(np.flatnonzero(want[p]))


def stream(ratio):
    """Inputs [3, 256, hidden] and MRoPE triples of three sequences; 0 and 1 share their first 128 tokens."""
    rng = np.random.default_rng(ratio)
    x = rng.standard_normal((SEQUENCES, LENGTH, HIDDEN)).astype(np.float32)
    x[1, :128] = x[0, :128]
    rope = np.broadcast_to(np.arange(LENGTH)[:, None], (LENGTH, 3)).copy()
    rope[30:60] = 30 + np.stack([0 * np.arange(30), np.arange(30) // 6, np.arange(30) % 6], axis=1)
    rope[60:] -= 24
    return x, np.broadcast_to(rope, (SEQUENCES, LENGTH, 3)).astype(np.int32)


@functools.cache
def whole(ratio, budget, mrope=True):
    """Every row answered in one call: outputs and block sets [3][256]."""
    x, rope = stream(ratio)
    batch = Batch.whole(jnp.zeros((SEQUENCES, LENGTH), jnp.int32))
    if mrope:
        batch = dataclasses.replace(batch, rope_positions=jnp.asarray(rope.reshape(-1, 3)))
    y, _, ids = run(*layer_of(ratio, budget), jnp.asarray(x.reshape(-1, HIDDEN)), batch, None)
    sets = blocks_of(ids)
    return np.asarray(y).reshape(x.shape), [sets[s * LENGTH : (s + 1) * LENGTH] for s in range(SEQUENCES)]


def centered(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + np.asarray(weight, np.float64))


def turned(x, rope):
    """x [..., D] at one position triple: 4 pairs (i, i + 4), of which 1 turns with height, 2 with width."""
    angle = np.asarray(rope, np.float64)[[0, 1, 2, 0]] * 1e4 ** (-np.arange(4) / 4)
    first, second, rest = x[..., :4], x[..., 4:8], x[..., 8:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@pytest.mark.parametrize("ratio", [4, 8])
def test_selection_and_output_equal_a_float64_reading(ratio):
    """At every position from 0 to 5 times the budget and more."""
    budget = 5 * ratio
    layer = nnx.merge(*layer_of(ratio, budget))
    (x, rope), (got, sets) = stream(ratio), whole(ratio, budget)
    weight = np.asarray(layer.in_proj.weight.value[...], np.float64)
    x, rope, got = x[2].astype(np.float64), rope[2], got[2]
    qg, k, v, index = np.split(x @ weight.T, np.cumsum([128, 32, 32]), axis=1)
    q, gate = np.split(qg.reshape(LENGTH, 4, 32), 2, axis=-1)
    index = index.reshape(LENGTH, 4, 12)
    q, k = centered(q, layer.q_norm.weight[...]), centered(k.reshape(-1, 2, 16), layer.k_norm.weight[...])
    q, k = (np.array([turned(t, r) for t, r in zip(part, rope, strict=True)]) for part in (q, k))
    v = v.reshape(-1, 2, 16)
    mean = index[:, 3].reshape(-1, ratio, 12).mean(1)
    starts = rope[::ratio]
    block_keys = np.array(
        [turned(m, r) for m, r in zip(centered(mean, layer.index_k_norm.weight[...]), starts, strict=True)]
    )
    for p in range(LENGTH):
        complete = (p + 1) // ratio
        iq = turned(centered(index[p, :3], layer.index_q_norm.weight[...]), rope[p])
        scores = np.maximum(iq @ block_keys[:complete].T, 0).sum(0)
        order = np.argsort(-scores, kind="stable")
        assert sets[2][p] == {*order[:5].tolist(), *([complete] if (p + 1) % ratio else [])}
        seen = sorted(tokens_of(sets[2][p], ratio, p))
        out = np.zeros((4, 16))
        for head in range(4):
            score = k[seen, head // 2] @ q[p, head] / 4
            share = np.exp(score - score.max())
            out[head] = share @ v[seen, head // 2] / share.sum()
        out = (out / (1 + np.exp(-gate[p]))).reshape(-1)
        want = np.asarray(layer.o_proj.weight.value[...], np.float64) @ out
        np.testing.assert_allclose(got[p], want, rtol=3e-5, atol=3e-5)


def empty_cache(ratio, dtype=jnp.float32):
    return IndexedPagedCache(
        keys=jnp.full((PAGES, 2, 64, 16), jnp.nan, dtype),
        values=jnp.full((PAGES, 2, 64, 16), jnp.nan, dtype),
        index_keys=jnp.full((PAGES, 64 // ratio, 12), jnp.nan, dtype),
        pending=jnp.full((SLOTS, ratio, 12), jnp.nan, dtype),
        pending_rope=jnp.full((SLOTS, 3), -(10**6), jnp.int32),
    )


class Server:
    """Runs a schedule over one poisoned cache and checks each row against the one-shot answers."""

    def __init__(self, ratio, budget, seed, mrope=True, columns=4):
        rng = np.random.default_rng(seed)
        self.ratio, self.model, self.mrope = ratio, layer_of(ratio, budget), mrope
        self.x, self.rope = stream(ratio)
        self.want = whole(ratio, budget, mrope)
        self.cache = empty_cache(ratio)
        self.table = np.zeros((SEQUENCES, columns), np.int32)
        self.table[:, :4] = rng.permutation(np.arange(1, PAGES))[:12].reshape(SEQUENCES, 4)
        self.slot = rng.permutation(np.arange(1, SLOTS))[:SEQUENCES]
        self.order = rng.permutation(SEQUENCES)
        self.done = np.zeros(SEQUENCES, int)

    def step(self, mode, rows, tile_sequence=None, shared=None, checked=True):
        """rows: (sequence, position) of each row, None for padding."""
        x = np.full((len(rows), HIDDEN), np.nan, np.float32)
        positions, rope = np.full(len(rows), -1, np.int32), np.full((len(rows), 3), 9**6, np.int32)
        for i, item in enumerate(rows):
            if item is not None:
                x[i], positions[i], rope[i] = self.x[item], item[1], self.rope[item]
        owners = [None if item is None else item[0] for item in rows] if mode is Mode.DECODE else self.order
        slots = [0 if s is None else self.slot[s] for s in owners] + [0]
        table = [np.zeros_like(self.table[0]) if s is None else self.table[s] for s in owners]
        table.append(np.zeros_like(self.table[0]))
        count = len(slots) - (mode is Mode.DECODE)
        batch = Batch(
            tokens=jnp.zeros((len(rows),), jnp.int32),
            positions=jnp.asarray(positions),
            tile_sequence=jnp.asarray([] if tile_sequence is None else tile_sequence, jnp.int32),
            context_length=jnp.zeros((count,), jnp.int32),
            slot=jnp.asarray(slots[:count], jnp.int32),
            page_table=jnp.asarray(np.array(table[:count])),
            logit_rows=jnp.zeros((0,), jnp.int32),
            rope_positions=jnp.asarray(rope) if self.mrope else None,
            mode=mode,
        )
        before = self.cache
        y, self.cache, ids = run(*self.model, jnp.asarray(x), batch, before, shared)
        self.check_caches(before, rows, mode, shared is not None)
        sets = blocks_of(ids)
        for i, item in enumerate(rows):
            if item is None:
                assert sets[i] == set()
            elif checked:
                s, p = item
                assert sets[i] == self.want[1][s][p], (s, p)
                np.testing.assert_allclose(y[i], self.want[0][s, p], rtol=3e-5, atol=3e-5)
        return y, sets

    def check_caches(self, before, rows, mode, shared):
        """Written index keys stay as they are; what is not of the step stays untouched."""
        old, new = (np.asarray(c.index_keys)[1:] for c in (before, self.cache))
        known = np.isfinite(old)
        np.testing.assert_array_equal(new[known], old[known])
        here = {item for item in rows if item is not None}
        pages = {int(self.table[s, p // 64]) for s, p in here}
        others = sorted(set(range(1, PAGES)) - pages)
        # Of the raw keys, only those of blocks that stay incomplete are kept (or, decoding, the row's own).
        columns = np.zeros((SLOTS, self.ratio), bool)
        for s, p in here:
            if mode is Mode.DECODE or p // self.ratio * self.ratio + self.ratio > self.done[s]:
                columns[self.slot[s], p % self.ratio] = True
        columns[0] = True
        old, new = np.asarray(before.pending), np.asarray(self.cache.pending)
        np.testing.assert_array_equal(new[~columns], old[~columns])
        assert shared or np.isfinite(new[columns][self.ratio :]).all()
        for name, kept in (("keys", others), ("values", others), ("index_keys", others)):
            old, new = (np.asarray(getattr(c, name))[kept] for c in (before, self.cache))
            np.testing.assert_array_equal(new, old)

    def prefill(self, chunks):
        """chunks: (sequence, end); tiles in that order, the rest padding."""
        rows, tiles = [], []
        for s, end in chunks:
            start, self.done[s] = self.done[s], end
            assert start % 64 == 0
            rows += [(s, p) for p in range(start, end)] + [None] * (-end % 64)
            tiles += [int(np.flatnonzero(self.order == s)[0])] * -(-(end - start) // 64)
        rows += [None] * (TILES * TILE - len(rows))
        return self.step(Mode.PREFILL, rows, tiles + [SEQUENCES] * (TILES - len(tiles)))

    def decode(self, sequences, **options):
        rows = [(s, int(self.done[s])) for s in sequences]
        self.done[list(sequences)] += 1
        return self.step(Mode.DECODE, rows + [None] * (SEQUENCES + 1 - len(rows)), **options)


@settings(max_examples=12)
@given(data=st.data(), ratio=st.sampled_from([4, 8]), seed=st.integers(0, 99))
def test_any_schedule_selects_and_answers_as_one_call_would(data, ratio, seed):
    server = Server(ratio, 5 * ratio, seed)
    prompts = [data.draw(st.integers(1, 230), label=f"prompt {s}") for s in range(SEQUENCES)]
    ends = [p + data.draw(st.integers(0, 3 * ratio), label=f"new tokens {s}") for s, p in enumerate(prompts)]
    share = data.draw(st.integers(0, 2), label="pages of sequence 0 that sequence 1 shares")
    share = min(share, prompts[0] // 64, (prompts[1] - 1) // 64)
    for _ in range(200):
        waiting = [s for s in range(SEQUENCES) if server.done[s] < prompts[s]]
        if share and server.done[0] < share * 64 and 1 in waiting:
            waiting.remove(1)
        elif share and server.done[1] == 0:
            server.table[1, :share] = server.table[0, :share]
            server.done[1] = share * 64
        running = [s for s in range(SEQUENCES) if prompts[s] <= server.done[s] < ends[s]]
        if not waiting and not running:
            break
        if waiting and (not running or data.draw(st.booleans(), label="prefill")):
            chunks, room = [], TILES
            for s in data.draw(st.permutations(waiting), label="order"):
                left = -(-(prompts[s] - server.done[s]) // 64)
                tiles = min(data.draw(st.integers(1, 4), label="tiles"), left, room)
                if tiles:
                    chunks.append((s, min(int(server.done[s]) + tiles * 64, prompts[s])))
                    room -= tiles
            server.prefill(chunks)
        else:
            chosen = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True), label="decode")
            server.decode(chosen)
    assert server.done.tolist() == [max(p, e) for p, e in zip(prompts, ends, strict=True)]


def test_decoding_from_the_first_token_equals_one_call_with_and_without_triples():
    for mrope in (True, False):
        server = Server(4, 20, 1, mrope)
        for _ in range(70):
            server.decode([0, 2])


def test_contexts_within_the_budget_are_exactly_dense():
    """The first budget + ratio - 1 tokens see all blocks, and not a bit differs from an unbounded budget."""
    for ratio, budget in ((4, 40), (8, 64)):
        some, all_of_it = whole(ratio, budget), whole(ratio, 4096)
        dense = budget + ratio - 1
        for s in range(SEQUENCES):
            np.testing.assert_array_equal(some[0][s, :dense], all_of_it[0][s, :dense])
            assert all(some[1][s][p] == set(range(p // ratio + 1)) for p in range(dense))
            assert len(some[1][s][dense]) == budget // ratio and dense // ratio + 1 > budget // ratio


def test_a_draft_step_attends_to_the_captured_blocks_and_all_later_ones():
    ratio = 4
    for prompt in (97, 98, 99, 100):
        server, plain = Server(ratio, 20, 3), Server(ratio, 20, 3)
        _, sets = server.prefill([(0, prompt)])
        plain.prefill([(0, prompt)])
        captured = sorted(sets[prompt - 1])
        ids = np.full((4, 1, 6), -1, np.int32)
        ids[0, 0, : len(captured)] = captured
        shared = SharedBlocks(jnp.asarray(ids), jnp.array([prompt, 0, 0, 0], jnp.int32), steps=6)
        before = server.cache
        for position in range(prompt, prompt + 6):
            y, got = server.decode([0], shared=shared, checked=False)
            later = {t // ratio for t in range(prompt, position + 1)}
            assert got[0] == {*captured, *later}
            # The same tokens, chosen by itself, give the same answer.
            want, own = plain.decode([0])
            if own[0] == got[0]:
                np.testing.assert_array_equal(y[0], want[0])
            assert np.isfinite(y[0]).all()
        for name in ("index_keys", "pending", "pending_rope"):
            np.testing.assert_array_equal(getattr(server.cache, name)[1:], getattr(before, name)[1:])


def test_the_index_gets_no_gradient_and_everything_else_does():
    definition, parameters = layer_of(4, 20, True)
    x = jnp.asarray(stream(4)[0][2])
    batch = Batch.whole(jnp.zeros((1, LENGTH), jnp.int32))

    def loss(parameters):
        return jnp.sum(jnp.sin(run(definition, parameters, x, batch, None)[0]))

    layer = nnx.merge(definition, jax.grad(loss)(parameters))
    weight = np.asarray(layer.in_proj.weight.value[...])
    assert (weight[-48:] == 0).all() and (np.abs(weight[:-48]).max(axis=1) > 0).all()
    for norm, zero in ((layer.index_q_norm, True), (layer.index_k_norm, True), (layer.q_norm, False)):
        assert (np.asarray(norm.weight[...]) == 0).all() == zero
    for bias in (layer.in_bias, layer.o_bias):
        assert np.isfinite(bias[...]).all() and np.abs(bias[...]).max() > 0


def test_bfloat16_stays_bfloat16_and_index_keys_agree_between_prefill_and_decode():
    definition, parameters = layer_of(4, 20, True, jnp.bfloat16)
    x = jnp.asarray(stream(4)[0][2, :64]).astype(jnp.bfloat16)
    base = Batch.whole(jnp.zeros((1, 64), jnp.int32))
    one = jnp.ones((1,), jnp.int32)
    base = dataclasses.replace(base, slot=one, page_table=jnp.ones((1, 1), jnp.int32), mode=Mode.PREFILL)
    y, at_once, _ = run(definition, parameters, x, base, empty_cache(4, jnp.bfloat16))
    assert y.dtype == at_once.keys.dtype == at_once.index_keys.dtype == at_once.pending.dtype == jnp.bfloat16
    cache = empty_cache(4, jnp.bfloat16)
    for p in range(64):
        row = dataclasses.replace(
            base,
            tokens=base.tokens[:1],
            positions=jnp.full((1,), p, jnp.int32),
            tile_sequence=jnp.zeros((0,), jnp.int32),
            mode=Mode.DECODE,
        )
        _, cache, _ = run(definition, parameters, x[p : p + 1], row, cache)
    got, want = (np.asarray(c.index_keys[1].astype(jnp.float32)) for c in (cache, at_once))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def test_trees_are_refused():
    batch = dataclasses.replace(Batch.whole(jnp.zeros((1, 64), jnp.int32)), mode=Mode.VERIFY)
    with pytest.raises(NotImplementedError, match="VERIFY"):
        run(*layer_of(4, 20), jnp.zeros((64, HIDDEN)), batch, empty_cache(4))
