"""One request's way through its grammar: which tokens may come next, computed while the device is busy."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridjax.errors import GrammarError, HybridJaxError

MASK_TIMEOUT = 30.0
QUICK_ACCEPT = 0.001  # seconds; no longer than this, taking a token does not count


@dataclasses.dataclass(frozen=True)
class EndTokens:
    """Tokens that end a completion instead of being part of its text.

    Attributes:
      model: the model's own end tokens.
      own: further ones of the request. Where the grammar has them as text, they may come before its end.
      last: they are only allowed where nothing else is: what ``ignore_eos`` means with a grammar.
      min_tokens: until so many tokens have been generated, likewise.
    """

    model: Sequence[int] = ()
    own: Sequence[int] = ()
    last: bool = False
    min_tokens: int = 0


class Matcher:
    """Where a completion stands in its grammar.

    ``accept`` is called by one thread; ``mask``, ``ready`` and ``is_complete`` by any. A mask is computed
    in a worker, beginning when its token is accepted.

    Args:
      state: an llguidance LLMatcher at its start; the matcher's own from now on.
      first: its mask, bytes; accepting: whether it may end there.
      vocab_size: of the model, in tokens: the length of masks in bits.
      ends: see EndTokens.
      workers: computes masks.
      accept_seconds: of CPU time that taking tokens may need in all, beyond QUICK_ACCEPT for each: for so
        long other requests can be held up.
    """

    def __init__(
        self,
        state: Any,
        first: bytes,
        accepting: bool,
        vocab_size: int,
        ends: EndTokens,
        workers: concurrent.futures.Executor,
        accept_seconds: float = 0.05,
    ):
        self._state = state
        self._vocab = vocab_size
        self._ends = ends
        self._model_bits = _bits(ends.model, vocab_size)
        self._all_bits = self._model_bits | _bits(ends.own, vocab_size)
        self._workers = workers
        self._accept_left = accept_seconds
        self._count = 0
        self._complete = False
        self._next: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()
        self._next.set_result(self._finish(first, accepting))

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is satisfied and nothing can follow."""
        return self._complete

    @property
    def ready(self) -> bool:
        """Whether ``mask`` would return, or raise, at once."""
        return self._next.done()

    def wait(self, seconds: float) -> bool:
        """Waits until ``ready``, for some seconds at most (none if below 0); whether it is."""
        return bool(concurrent.futures.wait([self._next], max(0.0, seconds)).done)

    def accept(self, token: int) -> None:
        """Takes the next token of the completion.

        Raises:
          HybridJaxError: the grammar does not allow the token here, or is complete.
          GrammarError: it goes beyond a limit here, or has before.
        """
        if self._complete:
            raise HybridJaxError(f"token {token} comes after the grammar's end")
        mask = self.mask()  # llguidance's state is not to be used by two threads
        start = time.thread_time()
        fits = self._state.consume_token(token)
        self._accept_left -= max(0.0, time.thread_time() - start - QUICK_ACCEPT)
        if not fits and mask[token // 32] >> np.uint32(token % 32) & 1:
            raise _beyond_limits(short(self._state.get_error() or "no reason given"))
        if not fits:
            raise HybridJaxError(f"token {token} does not fit the grammar")
        self._count += 1
        if self._state.is_stopped():
            self._complete = True
        elif self._accept_left < 0:
            raise _beyond_limits("taking its tokens needs too much time")
        else:
            self._next = self._workers.submit(self._compute)

    def mask(self) -> np.ndarray:
        """Bits of the tokens that may come next: uint32[ceil(vocab_size / 32)], lowest bit first, read-only.

        Blocks until it has been computed.

        Raises:
          GrammarError: it could not be computed within the limits.
        """
        try:
            return self._next.result(MASK_TIMEOUT)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            raise GrammarError("the grammar's next mask was not computed in time") from error

    def _compute(self) -> np.ndarray:
        mask = self._state.compute_bitmask()
        if self._state.is_error():
            raise _beyond_limits(short(self._state.get_error()))
        return self._finish(mask, self._state.is_accepting())

    def _finish(self, mask: bytes, accepting: bool) -> np.ndarray:
        """llguidance's mask with end tokens where the grammar may end, as words."""
        words = np.zeros_like(self._model_bits)
        size = min(len(mask), words.nbytes)
        words.view(np.uint8)[:size] = np.frombuffer(mask, np.uint8, size)
        words &= ~self._model_bits
        if self._vocab % 32:
            words[-1] &= np.uint32((1 << self._vocab % 32) - 1)
        if accepting:
            reluctant = self._model_bits if self._ends.last else np.zeros_like(words)
            if self._count < self._ends.min_tokens:
                reluctant = self._all_bits
            others = words & ~reluctant
            others |= self._all_bits & ~reluctant
            words = others if others.any() else words | self._all_bits
        elif self._count < self._ends.min_tokens and (words & ~self._all_bits).any():
            words &= ~self._all_bits
        if not words.any():
            raise GrammarError("the grammar allows no token of this model's")
        words.flags.writeable = False
        return words


def _bits(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        if token < vocab_size:
            words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def _beyond_limits(problem: str) -> GrammarError:
    return GrammarError(f"the completion goes beyond a limit of grammars here: {problem}")


def short(problem: str) -> str:
    """What llguidance's error says in a line, without its state and the grammar's text."""
    lines = problem.split("\n<")[0].strip().splitlines() or ["unknown error"]
    # Of an error in a regular expression the last line says what it is.
    causes = [line.strip() for line in lines[1:] if line.strip().startswith("error:")]
    return " ".join([lines[0][:300], *causes[:1]])[:500]
