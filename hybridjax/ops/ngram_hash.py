"""Which rows of the n-gram table a token reads: a hash of the token and the ones before it.

The hash needs integers of 63 bits. The host has them; the device computes in two 32-bit limbs, so that
x64 stays off. Source: qwen4_exp 8.1, 8.2.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from hybridjax.batch import Batch
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.configs.validation import check
from hybridjax.ops.dispatch import Op
from hybridjax.ops.history import history

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEED_STEP = 10007  # between the seeds of one PLE layer and the next
_LIMIT = 2**31


@dataclasses.dataclass(frozen=True)
class NgramHash:
    """Constants of one PLE layer's hash; hashable, so it can be static (qwen4_exp 8.1).

    Head h belongs to the (2 + h // heads_per_ngram)-gram that ends with the token; its row is
    ((x_t m_0) ^ (x_{t-1} m_1) ^ ...) mod head_sizes[h] + head_offsets[h].

    Fields:
      multipliers: one per token of the longest n-gram, the newest first; below 2^63 / vocab_size.
      head_sizes: rows of each head, consecutive primes below 2^31.
      head_offsets: first row of each head.
      rows: rows of the table, padding included; below 2^31.
      ngram_size: tokens in the longest n-gram.
      heads_per_ngram: heads of each n-gram length 2 .. ngram_size.
      eos: the id that ends a segment and stands for what there is before a segment.
      vocab_size: ids are below it.

    Raises:
      ConfigError: constants for which 63-bit products or 32-bit rows would overflow.
    """

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    rows: int
    ngram_size: int
    heads_per_ngram: int
    eos: int
    vocab_size: int

    def __post_init__(self):
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        check(len(self.multipliers) == self.ngram_size, "multipliers", self.multipliers,
              f"ngram_size ({self.ngram_size}) integers")  # fmt: skip
        check(len(self.head_sizes) == len(self.head_offsets) == heads, "head_sizes", self.head_sizes,
              f"{heads} sizes, with as many offsets")  # fmt: skip
        for i, value in enumerate(self.multipliers):
            check(0 < value and value * max(self.vocab_size - 1, 1) < 2**63, f"multipliers[{i}]", value,
                  f"such that its product with an id below {self.vocab_size} is below 2^63")  # fmt: skip
        for i, (size, offset) in enumerate(zip(self.head_sizes, self.head_offsets)):
            check(0 < size < _LIMIT, f"head_sizes[{i}]", size, "positive and below 2^31")
            check(0 <= offset <= self.rows - size, f"head_offsets[{i}]", offset,
                  f"such that {size} rows fit into the table's {self.rows}")  # fmt: skip
        ends = [offset + size for size, offset in zip(self.head_sizes, self.head_offsets)]
        for i, (end, after) in enumerate(zip(ends, self.head_offsets[1:])):
            check(
                end <= after, f"head_offsets[{i + 1}]", after, f"at least {end}, where the head before ends"
            )
        check(self.rows < _LIMIT, "rows", self.rows, "below 2^31")

    @classmethod
    def from_config(cls, config: Qwen4ExpConfig, ple_index: int) -> "NgramHash":
        """The hash of the ``ple_index``-th PLE layer, counted from zero in order of depth.

        Raises:
          ConfigError: there is no such layer, or the table would have 2^31 rows or more.
        """
        count = len(config.ple_layers)
        check(0 <= ple_index < count, "ple_index", ple_index, f"in 0..{count - 1}, the model's PLE layers")
        heads = (config.ngram_size - 1) * config.heads_per_ngram
        base = config.ngram_vocab_size_base
        check(base * heads < _LIMIT, "ngram_vocab_size_base", base,
              f"below {-(-_LIMIT // heads)}, as {heads} heads need less than 2^31 rows")  # fmt: skip
        sizes = _primes_from(base, (ple_index + 1) * heads)[ple_index * heads :]
        bounds = (0, *itertools.accumulate(sizes))
        unit = config.make_ngram_vocab_size_divisible_by
        half = max(1, (2**63 - 1) // config.vocab_size // 2)
        seed = config.seed + _SEED_STEP * ple_index
        draws = [_splitmix64((seed + _GAMMA * (i + 1)) & _MASK) for i in range(config.ngram_size)]
        return cls(
            multipliers=tuple(2 * (draw % half) + 1 for draw in draws),
            head_sizes=sizes,
            head_offsets=bounds[:-1],
            rows=-(-bounds[-1] // unit) * unit,
            ngram_size=config.ngram_size,
            heads_per_ngram=config.heads_per_ngram,
            eos=config.eos_token_id[0],
            vocab_size=config.vocab_size,
        )

    def rows_numpy(self, tokens: np.ndarray, context: np.ndarray | None = None) -> np.ndarray:
        """Rows of consecutive tokens of one sequence, on the host.

        Args:
          tokens: integers [T].
          context: integers [n - 1], the tokens before, oldest first; None at the sequence's start.

        Returns:
          int64[T, heads].
        """
        if context is None:
            context = np.full(self.ngram_size - 1, self.eos)
        known = np.concatenate([context, tokens]).astype(np.int64)
        newest = self.ngram_size - 1
        windows = [known[newest - k : len(known) - k] for k in range(self.ngram_size)]
        return self.window_rows_numpy(np.stack(windows, axis=1))

    def window_rows_numpy(self, windows: np.ndarray) -> np.ndarray:
        """Rows of the newest token of each window, on the host; the segment rule is applied here.

        Args:
          windows: integers [B, n]: x_t, x_{t-1}, ...; eos for what is before the sequence's start.

        Returns:
          int64[B, heads].
        """
        windows = np.asarray(windows, np.int64)
        ended = np.logical_or.accumulate(windows[:, 1:] == self.eos, axis=1)
        mixed = windows[:, 0] * self.multipliers[0]
        rows = np.empty((len(windows), len(self.head_sizes)), np.int64)
        for i in range(1, self.ngram_size):
            mixed = mixed ^ (np.where(ended[:, i - 1], self.eos, windows[:, i]) * self.multipliers[i])
            heads = slice((i - 1) * self.heads_per_ngram, i * self.heads_per_ngram)
            np.remainder(mixed[:, None], np.array(self.head_sizes[heads]), out=rows[:, heads])
        return rows + np.array(self.head_offsets)


def ngram_windows(
    tokens: jax.Array, batch: Batch, pool: jax.Array | None, hashing: NgramHash
) -> tuple[jax.Array, jax.Array | None]:
    """Each row's token and the n - 1 before it, as the hash sees them (qwen4_exp 8.2).

    What lies before the sequence, or before the last eos that precedes the row, reads as eos.

    Args:
      tokens: int32[N] ids of the batch's rows.
      batch: WHOLE, PREFILL or DECODE.
      pool: int32[slots, n - 1] the last ids of every sequence, oldest first; None in WHOLE mode.
      hashing: the layer's hash.

    Returns:
      int32[N, n]: x_t, x_{t-1}, ... (rows with position -1: meaningless), and the pool after the step.
    """
    offsets = tuple(range(1, hashing.ngram_size))
    found, pool = history(tokens, batch, pool, offsets, fill=hashing.eos)
    past = jnp.stack(found, axis=1)
    ended = jax.lax.associative_scan(jnp.logical_or, past == hashing.eos, axis=1)
    past = jnp.where(ended, jnp.asarray(hashing.eos, past.dtype), past)
    return jnp.concatenate([tokens[:, None], past], axis=1), pool


def _ngram_rows(windows: jax.Array, hashing: NgramHash) -> jax.Array:
    """Rows of the table for every head, in 32-bit integers and exact (qwen4_exp 8.1).

    Args:
      windows: int32[N, n] of ``ngram_windows``: x_t, x_{t-1}, ..., the segment rule already applied.
      hashing: the layer's hash.

    Returns:
      int32[N, heads], each in [head_offsets[h], head_offsets[h] + head_sizes[h]) whatever the window holds.
    """
    ids = windows.astype(jnp.uint32)
    high, low = _product(ids[:, 0], hashing.multipliers[0])
    rows = []
    for i in range(1, hashing.ngram_size):
        next_high, next_low = _product(ids[:, i], hashing.multipliers[i])
        high, low = high ^ next_high, low ^ next_low
        heads = slice((i - 1) * hashing.heads_per_ngram, i * hashing.heads_per_ngram)
        rows.append(_remainder(high[:, None], low[:, None], hashing.head_sizes[heads]))
    offsets = jnp.asarray(hashing.head_offsets, jnp.int32)
    return jnp.concatenate(rows, axis=1).astype(jnp.int32) + offsets


ngram_rows = Op("ngram_rows", _ngram_rows)


def _u32(value: int) -> jax.Array:
    return jnp.asarray(value, jnp.uint32)


def _product(x: jax.Array, multiplier: int) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of x * multiplier: uint32[...] each; the product is below 2^64."""
    m_high, m_low = multiplier >> 32, multiplier & 0xFFFFFFFF
    x1, x0 = x >> _u32(16), x & _u32(0xFFFF)
    m1, m0 = _u32(m_low >> 16), _u32(m_low & 0xFFFF)
    # Below 2^32: a product of 16-bit numbers leaves room for two 16-bit carries.
    middle = x1 * m0 + ((x0 * m0) >> _u32(16))
    other = x0 * m1 + (middle & _u32(0xFFFF))
    high = x1 * m1 + (middle >> _u32(16)) + (other >> _u32(16)) + x * _u32(m_high)
    return high, x * _u32(m_low)


def _remainder(high: jax.Array, low: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """(high 2^32 + low) mod each size: uint32[..., 1] -> uint32[..., sizes]."""
    divisor = jnp.asarray(sizes, jnp.uint32)
    step = 32 - max(sizes).bit_length()  # bits that fit above a remainder
    rest = high % divisor
    left = 32
    while left:
        bits = min(step, left)
        left -= bits
        chunk = (low >> _u32(left)) & _u32(2**bits - 1)
        rest = ((rest << _u32(bits)) | chunk) % divisor
    return rest


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes at or above ``start``: a sieve over a window that grows as needed."""
    start = max(start, 2)
    width = max(64, int(2 * count * math.log(start + count)))
    while True:
        divisors = _sieve(math.isqrt(start + width))
        prime = np.ones(width, bool)
        for p in divisors:
            prime[max(p * p, -(-start // p) * p) - start :: p] = False
        found = np.flatnonzero(prime)
        if len(found) >= count:
            return tuple((found[:count] + start).tolist())
        width *= 2


def _sieve(limit: int) -> list[int]:
    """All primes up to and including ``limit``."""
    prime = np.ones(limit + 1, bool)
    prime[:2] = False
    for p in range(2, math.isqrt(limit) + 1):
        if prime[p]:
            prime[p * p :: p] = False
    return np.flatnonzero(prime).tolist()
