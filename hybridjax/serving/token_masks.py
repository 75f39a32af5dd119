"""Masks of what grammars allow, from the host to the device."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from hybridjax.errors import HybridJaxError
from hybridjax.ops.sampling import SamplerState, mask_words, write_masks
from hybridjax.serving.compiling import Programs, abstract
from hybridjax.serving.plan import DecodeRow, NotLaunchedError, PrefillRow


class TokenMasks:
    """Writes the masks of a step's rows into the sampler's state; steps without grammars need nothing.

    Args:
      vocab_size: of the model.
      row_counts: how many masks are written at once, ascending: a program each.
      programs: where the programs are kept.
    """

    def __init__(self, vocab_size: int, row_counts: Sequence[int], programs: Programs):
        self._programs = programs
        self._words = mask_words(vocab_size)
        self._counts = tuple(row_counts)
        self._write = jax.jit(write_masks, donate_argnums=0)

    def warm(self, state: SamplerState) -> SamplerState:
        """Compiles every program. Writes only into slot 0, nobody's; takes ``state`` over."""
        for count in self._counts:
            state = self._written(state, np.zeros(count, np.int32), np.zeros((count, self._words), np.uint32))
        return state

    def write(self, state: SamplerState, masks: Mapping[int, np.ndarray]) -> SamplerState:
        """The state with masks uint32[W] by slot; takes ``state`` over."""
        count = next(count for count in self._counts if count >= len(masks))
        slots, rows = np.zeros(count, np.int32), np.zeros((count, self._words), np.uint32)
        for i, (slot, mask) in enumerate(masks.items()):
            slots[i], rows[i] = slot, mask
        return self._written(state, slots, rows)

    def _written(self, state: SamplerState, slots: np.ndarray, rows: np.ndarray) -> SamplerState:
        inputs = state.token_mask, slots, rows
        write = self._programs.late(
            ("masks", len(slots)), lambda: self._write.lower(*abstract(inputs)).compile()
        )
        return dataclasses.replace(state, token_mask=write(*inputs))


def row_masks(rows: Sequence[PrefillRow | DecodeRow]) -> dict[int, np.ndarray]:
    """Masks of the rows that sample a token under a grammar, by column; waits until they are computed.

    Raises:
      NotLaunchedError: naming a request whose grammar cannot go on.
    """
    masks = {}
    for column, row in enumerate(rows):
        matcher = row.request.matcher
        samples = not row.forced and (isinstance(row, DecodeRow) or row.is_last)
        if matcher is None or not samples:
            continue
        try:
            masks[column] = matcher.mask()
        except HybridJaxError as error:
            raise NotLaunchedError(str(error), [row.request]) from error
    return masks
