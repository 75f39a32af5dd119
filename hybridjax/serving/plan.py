"""What crosses the border between the host's scheduler and the device: plans down, results up."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hybridjax.batch import TILE
from hybridjax.errors import HybridJaxError
from hybridjax.serving.request import Request

Handle = Any  # whatever a runner returns from launch; only its own read understands it


class NotLaunchedError(HybridJaxError):
    """A runner could not dispatch a step and has changed no state, so only that step's requests fail.

    Attributes:
      requests: those at fault, if it can be told; the others' rows can be launched without them.
      is_public: whether the message is fit for clients.
    """

    def __init__(self, message: str, requests: Sequence[Request] = (), *, is_public: bool = False):
        super().__init__(message)
        self.requests = tuple(requests)
        self.is_public = is_public


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """Prompt tokens [start, end) of one request, starting on the 64-token grid.

    A chunk that does not end the prompt has ``is_last`` False and can neither be sampled nor lead to a
    decode row: construction fails when ``is_last`` disagrees with the prompt's length.

    Attributes:
      initial_slot: slot with the recurrent state before ``start``: the request's own, or a snapshot
        that is only read; irrelevant at position 0.
      snapshots: (position, slot) pairs: the state after the tokens before ``position``, a multiple of
        64 in (start, end], is also written to that slot.
      forced: the token to take instead of the sampled one, as far as it is known; see DecodeRow.
      epoch: the request's when the step was planned.
    """

    request: Request
    start: int
    end: int
    is_last: bool
    initial_slot: int = 0
    snapshots: tuple[tuple[int, int], ...] = ()
    forced: tuple[int, ...] = ()
    epoch: int = 0

    def __post_init__(self):
        length = self.request.prompt_length
        if not 0 <= self.start < self.end <= length or self.is_last != (self.end == length):
            raise ValueError(f"chunk [{self.start}, {self.end}), is_last={self.is_last}, prompt of {length}")

    @property
    def tiles(self) -> int:
        """64-row tiles that the chunk takes."""
        return -(-(self.end - self.start) // TILE)

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt's own tokens are scored; not again after a preemption."""
        return self.request.params.prompt_logprobs is not None and not self.request.output


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """One prefill step: chunks of different requests, each occupying whole 64-row tiles."""

    rows: tuple[PrefillRow, ...]

    @property
    def num_steps(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One running request in a decode dispatch.

    Attributes:
      position: position of the token being fed (the slot's last token on the device), which is the
        number of tokens already in the caches.
      steps: how many of the dispatch's steps this row may run, 1..num_steps.
      forced: what the first of these steps generate whatever they sample: tokens that were read before the
        request was preempted.
      epoch: the request's when the step was planned.
    """

    request: Request
    position: int
    steps: int
    forced: tuple[int, ...] = ()
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One decode dispatch over all running requests; ``num_steps`` is the most that any row may run."""

    rows: tuple[DecodeRow, ...]
    num_steps: int


Plan = PrefillPlan | DecodePlan


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Log probabilities of the prompt tokens start + 1 .. start + n, in a chunk from ``start`` on.

    Attributes:
      logprobs: float32[n].
      top_ids, top_logprobs: [n, MAX_TOP_LOGPROBS].
    """

    start: int
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a launch sampled. Column i belongs to row i of the plan.

    Attributes:
      tokens: int32[num_steps, rows]; -1 where the row was inactive (beyond its ``steps``, after a stop
        token that the device detected, or a prefill chunk that is not its prompt's last).
      logprobs: float32[num_steps, rows] log probabilities of ``tokens`` under the raw distribution.
      top_ids, top_logprobs: [num_steps, rows, MAX_TOP_LOGPROBS], None if no row asked for them.
      prompt_scores: by column, of prefill rows that asked for them.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_scores: Mapping[int, PromptScores] = dataclasses.field(default_factory=dict)


class Runner(Protocol):
    """The device side as the engine sees it. Called from the engine's thread only.

    Attributes:
      num_pages, num_slots: sizes of the state pools, page 0 and slot 0 (nobody's) included.
      page_size: tokens per page.
      max_decode_rows: rows of the largest decode bucket.
      max_decode_steps: most steps of a decode dispatch.
      max_prefill_tiles: 64-row tiles of the largest prefill bucket.
      prefill_sizes: tiles of all prefill buckets, ascending (optional).
      context_length: longest prompt + completion.
    """

    num_pages: int
    num_slots: int
    page_size: int
    max_decode_rows: int
    max_decode_steps: int
    max_prefill_tiles: int
    vocab_size: int
    context_length: int

    def admit(self, request: Request) -> None:
        """Resets the request's slot of the sampler state if the request has penalties or a bias."""
        ...

    def launch(self, plan: Plan) -> Handle:
        """Dispatches a step without waiting for it. Steps run in the order of their launches.

        Raises:
          NotLaunchedError: nothing was dispatched and all state is as before; ``recover`` is not called.
          Any other exception: the state of all requests is taken for lost.
        """
        ...

    def read(self, handle: Handle) -> StepResult:
        """Blocks until the step is done. Handles are read in the order of their launches, each once."""
        ...

    def recover(self) -> bool:
        """Called after admit, launch or read has raised, when nothing is in flight; True to go on.

        Every admitted request has failed by then, so sequence state may be rebuilt from scratch;
        requests that had not been admitted go on.
        """
        ...

    def close(self) -> None:
        """Frees the device arrays; idempotent."""
        ...
