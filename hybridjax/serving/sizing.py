"""How large the pools are, and which shapes programs are compiled for."""

import dataclasses
import functools
import os
from typing import Any

import jax

from hybridjax.batch import TILE
from hybridjax.configs import EngineConfig
from hybridjax.errors import ConfigError
from hybridjax.ops.sampling import mask_words
from hybridjax.serving.programs import Bucket

_CPU_STATE_BYTES = 2**30  # state pools on a CPU, where memory is shared with everything else
_SLOT_SHARE = 0.3  # of the state memory, for recurrent slots when their number is not given


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Sizes of the state pools; ids 0 included.

    Attributes:
      num_pages, page_size: K/V pages.
      num_slots: recurrent and sampling slots, of running requests and of snapshots.
      max_running_requests: requests that may run together.
      context_length: longest prompt + completion.
      bytes_per_token, bytes_per_request: sequence state per cached token and per running request.
    """

    num_pages: int
    page_size: int
    num_slots: int
    max_running_requests: int
    context_length: int
    bytes_per_token: float
    bytes_per_request: int

    @property
    def max_total_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    @property
    def summary(self) -> str:
        """What the memory is for, in a line."""
        snapshots = self.num_slots - 1 - self.max_running_requests
        return (
            f"state: {self.max_total_tokens} tokens in K/V pages, {self.bytes_per_token / 2**10:.1f} KiB per "
            f"token; {self.max_running_requests} running requests and {snapshots} snapshots, "
            f"{self.bytes_per_request / 2**20:.2f} MiB each; context of {self.context_length} tokens"
        )


def free_state_bytes(config: EngineConfig) -> int:
    """Bytes that state pools may take: the static share of the device less what is in use."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(_CPU_STATE_BYTES, int(physical * 0.25))
    return int(stats["bytes_limit"] * config.mem_fraction_static) - stats["bytes_in_use"]


def ngram_layers(architecture: Any) -> int:
    """How many layers of an architecture have an n-gram table."""
    return len(getattr(getattr(architecture, "text_config", architecture), "ple_layers", ()))


def ngram_table_placement(config: EngineConfig, architecture: Any) -> str:
    """Where n-gram tables shall be: "device", "host" or "mmap"; what "auto" leaves open by their size.

    Args:
      config: flags.
      architecture: the model's configuration.
    """
    if config.ple_offload != "auto":
        return config.ple_offload
    text = getattr(architecture, "text_config", architecture)
    layers = ngram_layers(architecture)
    if not layers:
        return "device"
    heads = (text.ngram_size - 1) * text.heads_per_ngram
    values = layers * text.ngram_vocab_size_base * heads * (text.ple_embed_dim // heads)
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = stats["bytes_limit"] if stats else physical
    return "device" if values * 2 <= memory / 8 else "host"


def pool_sizes(config: EngineConfig, model: Any, free_bytes: int | None = None) -> PoolSizes:
    """Sizes from flags, and what flags leave open from the free memory.

    Args:
      config: flags.
      model: a CausalLM.
      free_bytes: see free_state_bytes.

    Raises:
      ConfigError: the flags do not fit the model or the memory.
    """
    own_limit = model.config.max_position_embeddings
    context = config.context_length or own_limit
    if context > own_limit:
        raise ConfigError(f"context_length is {context}; the model was built for at most {own_limit}")
    page = model.page_size
    if config.page_size not in (None, page):
        raise ConfigError(f"page_size is {config.page_size}; this model's pages hold {page} tokens")
    size = model.state_size()
    # Beside the layers' state the sampler's: counts, whether seen, bias, and mask of every token.
    per_slot = size.per_slot + 9 * model.config.vocab_size + 4 * mask_words(model.config.vocab_size)
    free = free_state_bytes(config) if free_bytes is None else free_bytes

    on_cpu = jax.default_backend() == "cpu"
    running = config.max_running_requests
    if running is None:
        running = max(1, min(16 if on_cpu else 256, int(free * _SLOT_SHARE) // per_slot))
    snapshots = 0 if config.disable_radix_cache else config.max_mamba_cache_size
    if snapshots is None:
        spare = int(free * _SLOT_SHARE) // per_slot - running
        snapshots = max(4, min(2 * running, spare))
    slots = running + snapshots + 1
    left = free - slots * per_slot
    pages_per_context = -(-context // page)
    if config.max_total_tokens is not None:
        pages = -(-config.max_total_tokens // page)
    else:
        pages = min(max(0, left) // max(1, size.per_page) - 1, running * pages_per_context)
    needed = slots * per_slot + (pages + 1) * size.per_page
    if pages < 1 or needed > free:
        raise ConfigError(
            f"state for {running} running requests and {max(pages, 0) * page} tokens takes "
            f"{needed / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free. Lower max_running_requests, "
            "max_total_tokens or context_length, or raise mem_fraction_static"
        )
    return PoolSizes(
        num_pages=pages + 1,
        page_size=page,
        num_slots=slots,
        max_running_requests=running,
        context_length=min(context, pages * page),
        bytes_per_token=size.per_page / page,
        bytes_per_request=per_slot,
    )


def buckets(
    config: EngineConfig,
    sizes: PoolSizes,
    *,
    steps: int | None = None,
    images: bool = False,
    vocab_limit: int | None = None,
) -> tuple[Bucket, ...]:
    """The shapes to compile: geometric in rows and in page-table columns, smallest first.

    Under deterministic inference only the largest, because XLA chooses the order of sums by shape.

    Args:
      config, sizes: flags and pools.
      steps: decode steps per dispatch (default: the flag's).
      images, vocab_limit: see Bucket.
    """
    columns = -(-sizes.context_length // sizes.page_size)
    pages = _geometric(columns, smallest=16)
    tiles = _geometric(prefill_tiles(config, sizes), smallest=2)
    rows = _geometric(sizes.max_running_requests, smallest=1)
    if config.enable_deterministic_inference:
        pages, tiles, rows = pages[-1:], tiles[-1:], rows[-1:]
    steps = config.num_continuous_decode_steps if steps is None else steps
    bucket = functools.partial(Bucket, images=images, vocab_limit=vocab_limit)
    prefill = [bucket("prefill", t, p) for t in tiles for p in pages]
    decode = [bucket("decode", r, p, steps) for r in rows for p in pages]
    return tuple(sorted(prefill + decode, key=lambda b: (b.mode, b.rows, b.pages)))


def mask_counts(sizes: PoolSizes) -> tuple[int, ...]:
    """How many token masks are written at once: as many as rows need, in few shapes."""
    return tuple(_geometric(sizes.max_running_requests, smallest=1))


def prefill_tiles(config: EngineConfig, sizes: PoolSizes) -> int:
    """64-row tiles of the largest prefill step."""
    chunk = config.chunked_prefill_size or (512 if jax.default_backend() == "cpu" else 2048)
    whole = -(-sizes.context_length // TILE)
    return whole if chunk == -1 else min(whole, -(-chunk // TILE))


def _geometric(largest: int, smallest: int, ratio: int = 4) -> list[int]:
    """largest, largest / 4, ... as long as they reach ``smallest``, ascending."""
    values = [largest]
    while values[-1] > smallest and -(-values[-1] // ratio) >= smallest:
        values.append(-(-values[-1] // ratio))
    return values[::-1]
