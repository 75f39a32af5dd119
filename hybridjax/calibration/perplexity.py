"""How well a checkpoint predicts text, run layer by layer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridjax.calibration.streaming import LayerStream
from hybridjax.calibration.text import Sample, batches


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What a text costs.

    Attributes:
      tokens: that were predicted; bytes: of their text.
      nats: -ln p of them all.
      hidden: the last layer's hidden states, per batch.
      divergence: nats per token, the mean Kullback-Leibler divergence from the predictions of the model that
        this one was compared with; None: with none.
    """

    tokens: int
    bytes: int
    nats: float
    hidden: list[np.ndarray] = dataclasses.field(repr=False, default_factory=list)
    divergence: float | None = None

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def measure(
    directory: Path,
    samples: Sequence[Sample],
    *,
    dtype: Any = None,
    activations: str = "w4a16",
    against: Perplexity | None = None,
    step: Callable[[], object] = lambda: None,
) -> Perplexity:
    """Predicts every token of the samples but the first of each.

    Args:
      directory: a model directory, quantised or not.
      samples: the text.
      dtype: of the computation; None: the checkpoint's.
      activations: "w4a16" or "w4a4", for weights in NVFP4.
      against: what the same text costs the unquantised model, whose last parts this one must share.
      step: is called after every layer.
    """
    stream = LayerStream(directory, dtype, activations)
    work = batches(samples)
    hidden = [stream.embed(tokens) for tokens in work]
    for index in range(stream.count):
        layer = stream.layer(index)
        for i, tokens in enumerate(work):
            hidden[i] = layer(hidden[i], tokens.whole(), stream.ngram_rows(index, tokens))
        step()
    nats = divergence = 0.0
    for i, tokens in enumerate(work):
        costs = stream.costs(hidden[i], tokens, None if against is None else against.hidden[i])
        nats, divergence = nats + costs[0], divergence + costs[1]
    count = sum(len(s.ids) - 1 for s in samples)
    compared = None if against is None else divergence / count
    return Perplexity(count, sum(s.bytes for s in samples), nats, hidden, compared)
