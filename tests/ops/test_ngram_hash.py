"""The n-gram hash against Python integers, the released constants and stored checkpoints."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.errors import ConfigError
from hybridjax.ops.ngram_hash import NgramHash, ngram_rows, ngram_windows

GOLDENS = Path(__file__).parent.parent / "goldens" / "qwen4_exp"
RELEASED = NgramHash.from_config(Qwen4ExpConfig(), 0)
EOS = 248044

SMALL = NgramHash(
    multipliers=(35454616657218897, 4295158889762567, 19285316470915801, 10634470178853139),
    head_sizes=(503, 509, 521, 523, 541, 547),
    head_offsets=(0, 503, 1012, 1533, 2056, 2597),
    rows=3200,
    ngram_size=4,
    heads_per_ngram=2,
    eos=3,
    vocab_size=256,
)
# Heads just below 2^31 leave one bit per step of the remainder; ids just below 2^31 fill the products.
WIDE = NgramHash(
    multipliers=(2**32 - 1, 2**32 - 5),
    head_sizes=(2**31 - 1,),
    head_offsets=(0,),
    rows=2**31 - 1,
    ngram_size=2,
    heads_per_ngram=1,
    eos=1,
    vocab_size=2**31,
)
TINY = dataclasses.replace(
    WIDE, multipliers=(2**63 - 1, 2**62 + 1), head_sizes=(1,), head_offsets=(4,), rows=5, vocab_size=2
)
HASHES = {"released": RELEASED, "small": SMALL, "wide": WIDE, "tiny": TINY}

device_rows = jax.jit(functools.partial(ngram_rows), static_argnums=1)
device_windows = jax.jit(ngram_windows, static_argnums=3)


def plain_windows(tokens, hashing):
    """Each token's window by the rule's own words: never across an eos that precedes the token."""
    windows = []
    for t in range(len(tokens)):
        start = max((i + 1 for i in range(t) if tokens[i] == hashing.eos), default=0)
        windows.append([tokens[t - n] if t - n >= start else hashing.eos for n in range(hashing.ngram_size)])
    return windows


def plain_rows(windows, hashing):
    """The hash in Python's integers."""
    rows = []
    for window in windows:
        row = []
        for h, (size, offset) in enumerate(zip(hashing.head_sizes, hashing.head_offsets)):
            mixed = 0
            for n in range(2 + h // hashing.heads_per_ngram):
                mixed ^= int(window[n]) * hashing.multipliers[n]
            row.append(mixed % size + offset)
        rows.append(row)
    return rows


def draw_tokens(seed, length, hashing, share_of_eos=0.2):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, hashing.vocab_size, length)
    return np.where(rng.random(length) < share_of_eos, hashing.eos, tokens)


def test_released_constants():
    assert RELEASED.multipliers == (23703573157769, 20109073645365, 8052911324071)
    primes = "003 023 033 047 059 063 069 077 081 093 107 147 153 159 161 171"
    assert RELEASED.head_sizes == tuple(20000000 + int(p) for p in primes.split())
    assert RELEASED.head_offsets[:3] == (0, 20000003, 40000026)
    assert RELEASED.head_offsets[-1] == 300001275
    assert (RELEASED.rows, RELEASED.eos) == (320001536, EOS)
    assert hash(RELEASED) == hash(NgramHash.from_config(Qwen4ExpConfig(), 0))


@pytest.mark.parametrize(
    ("window", "want"),
    [
        ((1, EOS, EOS), "16121432,28938500,59087997,73487090,81148277,104500129,120276032,149373875,"
         "176283436,184305849,216528839,231080079,257961536,266068568,289043455,305959965"),
        ((200, 100, EOS), "6669481,25231135,54517055,75522994,90676203,102395039,139974376,143415227,"
         "164675732,199178354,201246635,232214480,253236281,274617176,281823939,318456244"),
        ((300, 200, 100), "6129193,20484628,57667260,77728366,86357215,109234597,123551585,149309416,"
         "172664702,184433127,201501905,227445817,243341740,279238932,284538191,311036336"),
    ],
)  # fmt: skip
def test_released_vectors(window, want):
    want = [int(row) for row in want.split(",")]
    windows = np.array([window])
    assert RELEASED.window_rows_numpy(windows)[0].tolist() == want
    assert device_rows(jnp.asarray(windows, jnp.int32), RELEASED)[0].tolist() == want


@pytest.mark.parametrize("name", ["text_small", "text_two_ple"])
def test_constants_are_those_stored_in_checkpoints(name):
    config = Qwen4ExpConfig.from_dict(json.loads((GOLDENS / name / "config.json").read_text()))
    tensors = load_file(GOLDENS / name / "model.safetensors")
    for index, layer in enumerate(config.ple_layers):
        hashing = NgramHash.from_config(config, index)
        stored = f"model.layers.{layer}.ple.ple_embedding."
        assert hashing.multipliers == tuple(tensors[stored + "layer_multipliers"])
        assert hashing.head_sizes == tuple(tensors[stored + "ngram_heads_vocab_sizes"])
        assert hashing.head_offsets == tuple(tensors[stored + "ngram_heads_offsets"])
        shards = [len(t) for key, t in tensors.items() if key.startswith(stored + "ngram_embedding.shard_")]
        assert hashing.rows == sum(shards)


@pytest.mark.parametrize("base", [1, 2, 3, 24, 500, 2**21])
def test_head_sizes_are_consecutive_primes(base):
    config = Qwen4ExpConfig(ple_layer_ids=(1, 2), ngram_vocab_size_base=base)
    sizes = NgramHash.from_config(config, 0).head_sizes + NgramHash.from_config(config, 1).head_sizes
    want, number = [], max(base, 2)
    while len(want) < len(sizes):
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            want.append(number)
        number += 1
    assert list(sizes) == want


@pytest.mark.parametrize("name", HASHES)
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 60), data=st.data())
def test_host_rows_equal_python_integers_however_the_tokens_are_cut(name, seed, length, data):
    hashing = HASHES[name]
    tokens = draw_tokens(seed, length, hashing)
    want = plain_rows(plain_windows(tokens, hashing), hashing)
    assert hashing.rows_numpy(tokens).tolist() == want
    cuts = sorted(data.draw(st.sets(st.integers(0, length))))
    known, got = np.full(hashing.ngram_size - 1, hashing.eos), []
    for start, end in zip([0, *cuts], [*cuts, length]):
        got += hashing.rows_numpy(tokens[start:end], known[-(hashing.ngram_size - 1) :]).tolist()
        known = np.concatenate([known, tokens[start:end]])
    assert got == want


def test_host_rows_in_pieces_of_13_1_16_11_with_eos_first_and_twice():
    tokens = draw_tokens(1, 41, RELEASED, share_of_eos=0)
    tokens[[0, 5, 6, 12, 13, 29]] = EOS
    want = plain_rows(plain_windows(tokens, RELEASED), RELEASED)
    known, got = np.full(2, EOS), []
    for piece in np.split(tokens, np.cumsum([13, 1, 16])):
        got += RELEASED.rows_numpy(piece, known[-2:]).tolist()
        known = np.concatenate([known, piece])
    assert got == want


@pytest.mark.parametrize("name", HASHES)
def test_device_rows_are_exact(name):
    hashing = HASHES[name]
    n, top = hashing.ngram_size, hashing.vocab_size - 1
    extremes = np.array(np.meshgrid(*[[0, 1, top // 2, top - 1, top]] * n)).reshape(n, -1).T
    drawn = np.random.default_rng(0).integers(0, hashing.vocab_size, (3000, n))
    windows = np.concatenate([np.maximum(extremes, 0), drawn])
    got = device_rows(jnp.asarray(windows, jnp.int32), hashing)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, plain_rows(windows, hashing))


def step(mode, chunks, tokens, **fields):
    """A batch of (sequence, slot, start, end) chunks in four tiles, or of single rows when decoding."""
    if mode is Mode.DECODE:
        ids = [tokens[s][start] for s, _, start, _ in chunks]
        positions = [start for _, _, start, _ in chunks]
        tiles, rows = [], [np.array([i]) for i in range(len(chunks))]
        ids, positions = [*ids, 0], [*positions, -1]
    else:
        ids, positions = np.zeros(4 * TILE, int), np.full(4 * TILE, -1)
        tiles, rows = [], []
        for i, (s, _, start, end) in enumerate(chunks):
            index = len(tiles) * TILE + start % TILE + np.arange(end - start)
            ids[index], positions[index] = tokens[s][start:end], np.arange(start, end)
            tiles += [i] * (-(-end // TILE) - start // TILE)
            rows.append(index)
        tiles += [len(chunks)] * (4 - len(tiles))
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    batch = Batch(
        tokens=ints(ids),
        positions=ints(positions),
        tile_sequence=ints(tiles),
        context_length=ints([*(c[3] for c in chunks), 0]),
        slot=ints([*(c[1] for c in chunks), 0]),
        page_table=jnp.zeros((len(chunks) + 1, 0), jnp.int32),
        logit_rows=ints([]),
        mode=mode,
        **fields,
    )
    return batch, rows


def test_windows_of_whole_sequences():
    tokens = np.stack([draw_tokens(seed, 100, SMALL) for seed in (0, 1)])
    batch = Batch.whole(jnp.asarray(tokens, jnp.int32))
    windows, pool = device_windows(batch.tokens, batch, None, SMALL)
    assert pool is None
    windows = windows.reshape(2, -1, 4)[:, :100]
    for got, sequence in zip(windows, tokens):
        np.testing.assert_array_equal(got, plain_windows(sequence, SMALL))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_windows_of_prefill_and_decode_equal_those_of_the_whole(seed, data):
    """Two sequences, cut anywhere on the grid, then decoded; what the pool held before means nothing."""
    lengths = data.draw(st.tuples(st.integers(1, 128), st.integers(1, 128)))
    tokens = [draw_tokens(seed + i, length + 6, SMALL) for i, length in enumerate(lengths)]
    cut = [data.draw(st.sampled_from([0, 64])) if length > 64 else 0 for length in lengths]
    pool = jnp.asarray(np.random.default_rng(seed).integers(-9, 9, (5, 3)), jnp.int32)
    before = pool
    got = [[], []]
    rounds = [[(s, 4 - s, 0, cut[s]) for s in range(2) if cut[s]]]
    rounds.append([(s, 4 - s, cut[s], lengths[s]) for s in range(2)])
    steps = [(Mode.PREFILL, chunks) for chunks in rounds if chunks]
    for t in range(6):
        steps.append((Mode.DECODE, [(s, 4 - s, lengths[s] + t, lengths[s] + t + 1) for s in range(2)]))
    for mode, chunks in steps:
        batch, rows = step(mode, chunks, tokens)
        windows, pool = device_windows(batch.tokens, batch, pool, SMALL)
        for (s, *_), r in zip(chunks, rows):
            got[s] += np.asarray(windows)[r].tolist()
    for s in range(2):
        assert got[s] == plain_windows(tokens[s].tolist(), SMALL)
        padded = [SMALL.eos] * 3 + tokens[s].tolist()
        assert pool[4 - s].tolist() == padded[-3:]
    np.testing.assert_array_equal(pool[1:3], before[1:3])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"multipliers": (2**63 // 255 + 1, 1, 1, 1)}, r"multipliers\[0\]"),
        ({"multipliers": (1, 1)}, "multipliers"),
        ({"head_sizes": (503, 2**31, 521, 523, 541, 547), "rows": 2**31 - 1}, r"head_sizes\[1\]"),
        ({"head_sizes": (503,)}, "head_sizes"),
        ({"rows": 3143}, r"head_offsets\[5\]"),
        ({"rows": 2**31}, "rows"),
    ],
)
def test_constants_that_would_overflow_are_refused(change, named):
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(SMALL, **change)


def test_a_config_with_too_large_a_table_and_a_layer_that_is_not_there():
    with pytest.raises(ConfigError, match="ngram_vocab_size_base"):
        NgramHash.from_config(Qwen4ExpConfig(ngram_vocab_size_base=2**40), 0)
    with pytest.raises(ConfigError, match="ple_index is 1"):
        NgramHash.from_config(Qwen4ExpConfig(), 1)


def test_heads_that_overlap_are_refused():
    good = NgramHash.from_config(Qwen4ExpConfig(), 0)
    offsets = (good.head_offsets[0], 1, *good.head_offsets[2:])
    with pytest.raises(ConfigError, match=r"head_offsets\[1\] is 1; it must be at least 20000003"):
        dataclasses.replace(good, head_offsets=offsets)
