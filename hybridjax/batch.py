"""The ragged batch that every layer receives, and the caches that hold all sequence state.

Layers own parameters and nothing else. What a sequence has accumulated (paged K/V, compressed keys,
recurrent state) lives in one pytree, passed in and returned by every step. This module defines
those pytrees; docs/design.md says who creates, owns and frees them.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Called with a name such as "layers.3.block_ids" and a value while a model runs: for tests, notebooks
# and draft models that read hidden states. Under jit the values are tracers.
Probe = Callable[[str, jax.Array], None]

TILE = 64  # rows per tile; recurrences run on this grid, anchored at absolute position 0


class Mode(enum.Enum):
    """How the rows of a batch relate to the sequences; static, so each mode is its own program."""

    WHOLE = "whole"  # B equally long sequences from position 0, no caches: training, teacher forcing
    PREFILL = "prefill"  # tiles of prompt tokens, caches read and written
    DECODE = "decode"  # one row per sequence, caches read and written
    VERIFY = "verify"  # rows are nodes of draft trees, caches read only


_static = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """N rows of B sequences. Every shape is static per bucket; padding is data, not shape.

    In WHOLE and PREFILL the rows come in tiles of 64: tile t (rows 64t .. 64t+63) holds tokens of one
    sequence, the token at position p in column p % 64. So a sequence's run starts on a tile border
    when its first position is a multiple of 64, and the grid on which recurrences are computed never
    depends on how a prompt was cut. In DECODE row i is the next token of sequence i.

    A padding row has position -1. Padding sequences have slot 0, context_length 0 and a page table of
    zeros: slot 0 and page 0 belong to nobody, may hold anything, and take the writes of padding.

    Fields:
      tokens: int32[N] ids.
      positions: int32[N] absolute positions, -1 for padding.
      tile_sequence: int32[T] sequence of each tile (WHOLE, PREFILL; T = N / 64), empty in DECODE.
      context_length: int32[B] tokens of the sequence in the caches after this step.
      slot: int32[B] recurrent-state slot.
      initial_slot: int32[B] slot that a PREFILL reads the state from: the own one, or a snapshot.
      snapshot_slot: int32[T] slot that the state after a full tile is also written to, 0 for none
        (PREFILL).
      page_table: int32[B, P] pages of each sequence in order of position, 0 beyond its end.
      logit_rows: int32[R] rows whose logits are wanted.
      rope_positions: int32[N, 3] temporal, vertical and horizontal positions for rotary embeddings; None:
        all three are ``positions``.
      ngram_rows: per PLE layer [N, E], the n-gram embeddings of each row; None: the model has the table.
      features: [M, hidden] image features; feature_index: int32[N] the feature that replaces a row's token
        embedding, -1 for none. Both None without images.
      parent, depth: int32[N] reserved for VERIFY: the tree's parent row and depth of each node.
      mode: the static mode.
      whole_length: tokens per sequence of a WHOLE batch, before padding to tiles; static.
    """

    tokens: jax.Array
    positions: jax.Array
    tile_sequence: jax.Array
    context_length: jax.Array
    slot: jax.Array
    page_table: jax.Array
    logit_rows: jax.Array
    initial_slot: jax.Array | None = None
    snapshot_slot: jax.Array | None = None
    rope_positions: jax.Array | None = None
    ngram_rows: tuple[jax.Array, ...] | None = None
    features: jax.Array | None = None
    feature_index: jax.Array | None = None
    parent: jax.Array | None = None
    depth: jax.Array | None = None
    mode: Mode = _static(default=Mode.PREFILL)
    whole_length: int = _static(default=0)

    @classmethod
    def whole(cls, input_ids: jax.Array) -> "Batch":
        """A WHOLE batch from int32[B, L] ids, each sequence padded to tiles."""
        sequences, length = input_ids.shape
        padded = -(-length // TILE) * TILE
        index = jnp.arange(padded, dtype=jnp.int32)
        ids = jnp.pad(input_ids.astype(jnp.int32), ((0, 0), (0, padded - length)))
        empty = jnp.zeros((sequences,), jnp.int32)
        return cls(
            tokens=ids.reshape(-1),
            positions=jnp.tile(jnp.where(index < length, index, -1), sequences),
            tile_sequence=jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), padded // TILE),
            context_length=jnp.full((sequences,), length, jnp.int32),
            slot=empty,
            page_table=jnp.zeros((sequences, 0), jnp.int32),
            logit_rows=jnp.zeros((0,), jnp.int32),
            mode=Mode.WHOLE,
            whole_length=length,
        )

    @property
    def row_sequence(self) -> jax.Array:
        """int32[N]: the sequence of each row."""
        if self.mode is Mode.DECODE:
            return jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        return jnp.repeat(self.tile_sequence, TILE, total_repeat_length=self.tokens.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of one attention layer for all sequences, addressed by page.

    A page is one sparse block. ``compressed`` entry c of a page is the mean of the 2 * stride keys that
    end with the page's (c + 1) * stride-th token; ``coarse`` is the mean of all keys of the page and the
    page before it. Both are filed under the page in which their window ENDS, so a page's content
    depends only on tokens up to its own end and can be shared by sequences that diverge after it.

    Fields (G key/value heads of size D; stride = page_size / 4), all in the model dtype:
      keys, values: [pages, G, page_size, D].
      compressed: [pages, G, 4, D]; coarse: [pages, G, D].
    """

    keys: jax.Array
    values: jax.Array
    compressed: jax.Array
    coarse: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentCache:
    """The state matrices of one linear-attention layer: float32[slots, heads, d_key, d_value]."""

    state: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedDeltaCache:
    """State of one Gated DeltaNet layer.

    Fields:
      state: float32[slots, Hv, Dk, Dv].
      conv: [slots, K - 1, channels] the last inputs of the convolution, oldest first, in the model dtype.
    """

    state: jax.Array
    conv: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedPagedCache:
    """Keys, values and index keys of one indexed-attention layer (QSA).

    Fields (G key/value heads of size D; index keys of size Di; blocks of ``ratio`` tokens):
      keys, values: [pages, G, page_size, D].
      index_keys: [pages, page_size / ratio, Di] compressed, normalised and rotated keys of complete blocks.
      pending: [slots, ratio, Di] raw index keys of the last tokens; the token at position p in column
        p % ratio.
      pending_rope: int32[slots, 3] rotary position of the first token of the block in ``pending``.
    """

    keys: jax.Array
    values: jax.Array
    index_keys: jax.Array
    pending: jax.Array
    pending_rope: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramCache:
    """State of one PLE (n-gram embedding) layer.

    Fields:
      conv: [slots, (K - 1) * dilation, C * hidden] the last inputs of the convolution, oldest first.
      context: int32[slots, n - 1] the last token ids, oldest first.
    """

    conv: jax.Array
    context: jax.Array


LayerCache = PagedCache | RecurrentCache | GatedDeltaCache | IndexedPagedCache | NgramCache
State = tuple[LayerCache, ...]
