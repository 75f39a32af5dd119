"""Compiles grammars against a tokenizer, before their requests are accepted."""

import collections
import concurrent.futures
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hybridjax.errors import HybridJaxError, QueueFullError, RequestError
from hybridjax.structured.matcher import QUICK_ACCEPT, EndTokens, Matcher, short
from hybridjax.structured.sandbox import Sandbox, SandboxError
from hybridjax.structured.source import to_llguidance
from hybridjax.structured.tokens import without_special_texts

logger = logging.getLogger(__name__)

_STACK_BYTES = 256 * 2**20  # virtual: llguidance recurses along chains of rules


@dataclasses.dataclass(frozen=True)
class GrammarLimits:
    """What a grammar may cost.

    Attributes:
      source_bytes: of its text.
      seconds: for compiling and trying it out.
      memory: bytes that this may take.
      mask_seconds: of CPU time for finding out what may come next.
      accept_seconds: of CPU time for taking tokens, see Matcher.
      trial_tokens: tokens of it that are generated to try it out.
      cached_grammars, cached_bytes: grammars that are known to be good, with their first masks, and how
        many bytes these take; each request compiles its own.
      lexer_fuel, step_fuel, lexer_states, grammar_size, step_items, row_items: llguidance's own limits.
    """

    source_bytes: int = 2**16
    seconds: int = 5
    memory: int = 2**30
    mask_seconds: float = 0.5
    accept_seconds: float = 0.05
    trial_tokens: int = 48
    cached_grammars: int = 128
    cached_bytes: int = 2**23
    lexer_fuel: int = 200_000
    step_fuel: int = 200_000
    lexer_states: int = 8000
    grammar_size: int = 200_000
    step_items: int = 50_000
    row_items: int = 2000

    def parser(self) -> dict[str, Any]:
        """Arguments of LLParserLimits."""
        return {
            "initial_lexer_fuel": self.lexer_fuel,
            "step_lexer_fuel": self.step_fuel,
            "max_lexer_states": self.lexer_states,
            "max_grammar_size": self.grammar_size,
            "step_max_items": self.step_items,
            "max_items_in_row": self.row_items,
            "verbose_errors": False,
        }


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A grammar that has been tried out, in JSON; its first mask, and whether it may be empty."""

    grammar: str
    mask: bytes
    accepting: bool


class GrammarCompiler:
    """Compiles grammars and remembers which are good, in memory only. Callable from any thread.

    Args:
      tokenizer: a hybridjax.text.Tokenizer that ``supports`` accepts.
      vocab_size: of the model: tokens beyond it are never allowed.
      eos_tokens: the model's end tokens, at least one.
      limits: see GrammarLimits.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_tokens: Sequence[int],
        limits: GrammarLimits | None = None,
    ):
        self.limits = limits or GrammarLimits()
        self._vocab = vocab_size
        known = min(vocab_size, tokenizer.id_limit)
        self._eos = tuple(token for token in eos_tokens if token < known)
        if not self._eos:
            raise HybridJaxError("grammars need an end token, which this model has not")
        self._setup = {
            "tokenizer": without_special_texts(tokenizer.serialized()),
            "vocab": tokenizer.id_limit,  # llguidance refuses fewer than there are
            "eos": list(self._eos),
            "limits": self.limits.parser(),
            "memory": self.limits.memory,
            "mask_seconds": self.limits.mask_seconds,
            "accept_seconds": self.limits.accept_seconds,
            "quick_accept": QUICK_ACCEPT,
            "trial_tokens": self.limits.trial_tokens,
        }
        self._sandbox = Sandbox(self._setup, self.limits.seconds)
        # Running requests' masks do not wait for new requests' grammars.
        self._builders = _deep_workers(min(2, os.cpu_count() or 1))
        self._workers = _deep_workers(min(4, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._backend: LLTokenizer | None = None
        self._cache: collections.OrderedDict[tuple[str, str], _Compiled] = collections.OrderedDict()
        self._in_progress: dict[tuple[str, str], concurrent.futures.Future[_Compiled]] = {}
        self._cached_bytes = 0

    @staticmethod
    def supports(tokenizer: Any) -> bool:
        """Whether the bytes of this tokenizer's tokens are known."""
        return bool(getattr(tokenizer, "has_token_bytes", False))

    @property
    def cached(self) -> int:
        """Grammars that are remembered."""
        return len(self._cache)

    def warm(self) -> None:
        """Prepares what the first grammar would wait for."""
        self._sandbox.start()
        self._builders.submit(self._tokenizer).result()

    def matcher(
        self,
        kind: str,
        source: str,
        field: str = "grammar",
        *,
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> Matcher:
        """A matcher for one request. Blocks while the grammar is compiled and, if it is new, tried out.

        Args:
          kind, source: see hybridjax.serving.api.Grammar.
          field: what errors call it.
          stop_tokens: the request's own, beside the model's end tokens.
          ignore_eos, min_tokens: of the request; a completed grammar ends it all the same.

        Raises:
          RequestError: the grammar is wrong, too large or too complex.
          QueueFullError: too many other grammars are being compiled.
        """
        compiled = self._compiled(kind, source, field)
        ends = EndTokens(self._eos, stop_tokens, ignore_eos, min_tokens)
        # Copies of one state share its lexer, and with it the limits and the errors of each other.
        try:
            job = self._builders.submit(self._fresh, compiled.grammar)
        except RuntimeError as error:
            raise HybridJaxError("grammars are no longer compiled: it has been shut down") from error
        try:
            state = self._result(job)
            return Matcher(
                state,
                compiled.mask,
                compiled.accepting,
                self._vocab,
                ends,
                self._workers,
                self.limits.accept_seconds,
            )
        except QueueFullError:
            raise
        except HybridJaxError as error:
            raise RequestError(f"{field}: {error}", param=field) from error

    def _result(self, job: "concurrent.futures.Future[Any]") -> Any:
        """What a job has made, unless others keep the builders busy for too long."""
        try:
            return job.result(4 * self.limits.seconds)
        except TimeoutError as error:
            job.cancel()
            raise QueueFullError("grammars are taking too long to compile") from error

    def close(self) -> None:
        """Ends the workers and the process; idempotent."""
        self._sandbox.close()
        for workers in (self._builders, self._workers):
            workers.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, kind: str, source: str, field: str) -> _Compiled:
        key = (kind, source)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known
            job = self._in_progress.get(key)
            mine = job is None
            if job is None:
                job = self._in_progress[key] = concurrent.futures.Future()
        if not mine:
            try:
                return self._result(job)
            except RequestError as error:  # it may name another request's field
                raise RequestError(_renamed(error, field), param=field) from error
        try:
            compiled = self._compile(kind, source, field)
        except BaseException as error:
            with self._lock:
                del self._in_progress[key]
            job.set_exception(error)
            raise
        with self._lock:
            del self._in_progress[key]
            self._keep(key, compiled)
        job.set_result(compiled)
        return compiled

    def _compile(self, kind: str, source: str, field: str) -> _Compiled:
        try:
            grammar = to_llguidance(kind, source, self.limits.source_bytes)
        except ValueError as error:
            raise RequestError(f"{field}: {error}", param=field) from error
        try:
            problem = self._sandbox.problem_of(grammar)
        except SandboxError as error:
            logger.warning("a grammar was refused: %s", error)
            raise RequestError(
                f"{field}: too complex: compiling it takes over {self.limits.seconds} s or too much memory",
                param=field,
            ) from error
        if problem is not None:
            raise RequestError(f"{field}: {short(problem)}", param=field)
        job = self._builders.submit(self._build, grammar)
        try:
            return self._result(job)
        except QueueFullError:
            raise
        except HybridJaxError as error:
            raise RequestError(f"{field}: {short(str(error))}", param=field) from error

    def _build(self, grammar: str) -> _Compiled:
        """Compiles a grammar that has survived the sandbox; in a worker, whose stack is deep."""
        state = self._fresh(grammar)
        mask = state.compute_bitmask()
        if state.is_error():
            raise HybridJaxError(state.get_error())
        return _Compiled(grammar, mask, state.is_accepting())

    def _fresh(self, grammar: str) -> LLMatcher:
        """A grammar's state at its start."""
        limits = LLParserLimits(**self.limits.parser())
        state = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        if state.is_error():
            raise HybridJaxError(state.get_error())
        return state

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._backend is None:
                self._backend = LLTokenizer(
                    self._setup["tokenizer"], n_vocab=self._setup["vocab"], eos_token=self._setup["eos"]
                )
            return self._backend

    def _keep(self, key: tuple[str, str], compiled: _Compiled) -> None:
        self._cache[key] = compiled
        self._cached_bytes += _size(key, compiled)
        while len(self._cache) > self.limits.cached_grammars or self._cached_bytes > self.limits.cached_bytes:
            self._cached_bytes -= _size(*self._cache.popitem(last=False))


def _size(key: tuple[str, str], compiled: _Compiled) -> int:
    return sys.getsizeof(key[1]) + sys.getsizeof(compiled.grammar) + sys.getsizeof(compiled.mask)


def _renamed(error: RequestError, field: str) -> str:
    message = str(error)
    return message if error.param is None else field + message.removeprefix(error.param)


def _deep_workers(count: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads with stacks of ``_STACK_BYTES``, which are all started here."""
    workers = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="hybridjax-grammar")
    gate = threading.Barrier(count + 1)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(count):
            workers.submit(gate.wait)
    finally:
        threading.stack_size(before)
    gate.wait()
    return workers
