"""Bits per byte of the held-out text, beside what xz makes of the same bytes.

Every token of a document after its ``<s>`` is predicted exactly once, the closing ``</s>`` included,
which the model pays for and xz does not. Documents are independent. Long ones are read in windows of L
tokens that start L / 2 apart, and a window scores only what the one before it did not reach, so
that each token has at least L / 2 tokens of context, or all there is.
"""

import dataclasses
import lzma
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridjax.training.data import HeldOutDocument, PreparedData
from hybridjax.training.tokenizer import EOS

# (inputs int32[B, L], targets int32[B, L], scored bool[B, L]) -> nats per row, float[B].
RowNats = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows that together score every held-out token once.

    Attributes:
      inputs, targets: int32[W, L], padded with ``</s>`` behind the end of a document.
      scored: bool[W, L], True where the target counts.
      document: int32[W], the index of each row's document.
    """

    inputs: np.ndarray
    targets: np.ndarray
    scored: np.ndarray
    document: np.ndarray


def sliding_windows(tokens: np.ndarray, documents: Sequence[HeldOutDocument], length: int) -> Windows:
    """Cuts each document into windows of ``length`` (even) with a stride of half of it."""
    stride = length // 2
    inputs, targets, scored, owner = [], [], [], []
    for index, document in enumerate(documents):
        ids = tokens[document.token_start : document.token_start + document.tokens].astype(np.int32)
        predicted = len(ids) - 1
        start = reached = 0
        while reached < predicted:
            end = min(start + length, predicted)
            row = np.full((2, length), EOS, np.int32)
            row[0, : end - start], row[1, : end - start] = ids[start:end], ids[start + 1 : end + 1]
            counts = np.zeros(length, bool)
            counts[reached - start : end - start] = True
            inputs.append(row[0])
            targets.append(row[1])
            scored.append(counts)
            owner.append(index)
            reached, start = end, start + stride
    return Windows(np.stack(inputs), np.stack(targets), np.stack(scored), np.asarray(owner, np.int32))


def xz_size(data: bytes) -> int:
    """Bytes that ``xz -9e`` makes of ``data``."""
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))


class Evaluator:
    """The held-out evaluation of one data directory.

    Args:
      data: what ``prepare`` wrote.
      length: tokens per window.
      batch: rows scored together.
      limit: number of documents, evenly spaced; None: all.
    """

    def __init__(self, data: PreparedData, *, length: int, batch: int, limit: int | None = None):
        self.documents = _evenly(data.documents, limit)
        self._windows = sliding_windows(data.heldout, self.documents, length)
        self._batch = batch
        self._groups = {"all": list(range(len(self.documents)))}
        for index, document in enumerate(self.documents):
            self._groups.setdefault(document.source, []).append(index)
        text = [data.text[d.byte_start : d.byte_start + d.bytes] for d in self.documents]
        self._xz = {name: xz_size(b"".join(text[i] for i in g)) for name, g in self._groups.items()}

    def __call__(self, row_nats: RowNats, *, per_document: bool = False) -> dict[str, Any]:
        """Scores all windows.

        Args:
          row_nats: sum of -ln p(target) over each row's scored targets.
          per_document: add a table ``"documents"`` by path.

        Returns:
          For "all" and for each source: documents, tokens, bytes, bits_per_token, bits_per_byte,
          xz_bytes and xz_bits_per_byte.
        """
        nats = self._nats(row_nats)
        report: dict[str, Any] = {
            name: {
                **self._figures(nats, group),
                "xz_bytes": self._xz[name],
                "xz_bits_per_byte": 8 * self._xz[name] / self._bytes(group),
            }
            for name, group in self._groups.items()
        }
        if per_document:
            report["documents"] = {d.path: self._figures(nats, [i]) for i, d in enumerate(self.documents)}
        return report

    def _nats(self, row_nats: RowNats) -> np.ndarray:
        windows, total = self._windows, np.zeros(len(self.documents), np.float64)
        for first in range(0, len(windows.document), self._batch):
            rows = np.arange(first, min(first + self._batch, len(windows.document)))
            padded = np.resize(rows, self._batch)
            live = np.arange(self._batch) < len(rows)
            found = row_nats(
                windows.inputs[padded], windows.targets[padded], windows.scored[padded] & live[:, None]
            )
            np.add.at(total, windows.document[rows], np.asarray(found, np.float64)[: len(rows)])
        return total

    def _bytes(self, group: list[int]) -> int:
        return sum(self.documents[i].bytes for i in group)

    def _figures(self, nats: np.ndarray, group: list[int]) -> dict[str, Any]:
        bits = float(nats[group].sum()) / math.log(2)
        tokens = sum(self.documents[i].tokens - 1 for i in group)
        return {
            "documents": len(group),
            "tokens": tokens,
            "bytes": self._bytes(group),
            "bits_per_token": bits / tokens,
            "bits_per_byte": bits / self._bytes(group),
        }


def _evenly(documents: Sequence[HeldOutDocument], limit: int | None) -> tuple[HeldOutDocument, ...]:
    if limit is None or limit >= len(documents):
        return tuple(documents)
    return tuple(documents[i * len(documents) // limit] for i in range(limit))
