"""N-gram rows from tables in host memory: hashed and gathered as soon as token ids are known."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hybridjax.serving.plan import DecodeRow, PrefillRow

# Steps whose tokens are not looked at yet; more than are ever under way, so that nothing is waited for.
_MOST_PENDING = 8


class NgramRows:
    """Gathers the n-gram embeddings of a step's rows and keeps each slot's last token ids.

    A decode step feeds tokens that the step before it samples: ``sampled`` notes where they will be, and
    ``decode`` waits for them. Used by one thread.

    Args:
      hashes: per PLE layer an ops.ngram_hash.NgramHash.
      tables: per PLE layer a host_table.HostTable.
      num_slots: state slots, slot 0 included.
    """

    def __init__(self, hashes: Sequence[Any], tables: Sequence[Any], num_slots: int):
        self._layers = tuple(zip(hashes, tables, strict=True))
        self._eos = hashes[0].eos
        self._size = hashes[0].ngram_size - 1
        # The last tokens of each slot's sequence, oldest first, the one to be fed next included.
        self._context = np.full((num_slots, self._size + 1), self._eos, np.int64)
        self._pending: list[tuple[jax.Array, np.ndarray]] = []

    def shapes(self, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of what ``prefill`` and ``decode`` return for a step of so many rows."""
        return tuple(
            jax.ShapeDtypeStruct((rows, len(hash.head_sizes) * table.shape[1]), table.dtype)
            for hash, table in self._layers
        )

    def prefill(self, chunks: Sequence[tuple[PrefillRow, int]], rows: int) -> tuple[jax.Array, ...]:
        """Rows [rows, E] per PLE layer of a prefill step; each chunk comes with its first row."""
        out = [np.zeros(shape.shape, shape.dtype) for shape in self.shapes(rows)]
        for chunk, begin in chunks:
            ids, start = chunk.request.prompt_ids, chunk.start
            known = np.full(self._size, self._eos, np.int64)
            before = ids[max(0, start - self._size) : start]
            known[self._size - len(before) :] = before
            tokens = ids[start : chunk.end]
            for target, (hash, table) in zip(out, self._layers):
                found = table.gather(hash.rows_numpy(tokens, known))
                target[begin : begin + len(tokens)] = found.reshape(len(tokens), -1)
            self._start(chunk.request.slot, np.concatenate([known, tokens])[-self._size :])
        return tuple(jax.device_put(array) for array in out)

    def decode(self, chunks: Sequence[DecodeRow], rows: int) -> tuple[jax.Array, ...]:
        """Rows [rows, E] per PLE layer of a decode step; waits for the tokens that it feeds."""
        self._resolve()
        slots = [chunk.request.slot for chunk in chunks]
        windows = self._context[slots][:, ::-1]
        out = [np.zeros(shape.shape, shape.dtype) for shape in self.shapes(rows)]
        for target, (hash, table) in zip(out, self._layers):
            found = table.gather(hash.window_rows_numpy(windows))
            target[: len(slots)] = found.reshape(len(slots), -1)
        return tuple(jax.device_put(array) for array in out)

    def sampled(self, tokens: jax.Array, rows: Sequence[DecodeRow | PrefillRow]) -> None:
        """Notes that a launched step will sample int32[1, B] ``tokens``, -1 for rows that emit none."""
        self._pending.append((tokens, np.array([row.request.slot for row in rows])))
        if len(self._pending) > _MOST_PENDING:
            self._resolve(1)

    def forget(self) -> None:
        """Drops what failed steps would have sampled."""
        self._pending.clear()

    def _start(self, slot: int, context: np.ndarray) -> None:
        """Sets a slot's tokens; what steps still in flight sample belongs to its former owner."""
        for _, slots in self._pending:
            slots[slots == slot] = 0
        self._context[slot, 1:] = context

    def _resolve(self, count: int | None = None) -> None:
        """Takes in what the oldest ``count`` steps have sampled; None: all of them."""
        pending, self._pending = self._pending[:count], [] if count is None else self._pending[count:]
        for tokens, slots in pending:
            found = np.asarray(tokens)[0, : len(slots)]
            slots, found = slots[found >= 0], found[found >= 0]
            self._context[slots, :-1] = self._context[slots, 1:]
            self._context[slots, -1] = found
