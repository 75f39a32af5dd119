"""The engine's side of structured output: from a request's parameters to its matcher."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from hybridjax.errors import HybridJaxError, RequestError
from hybridjax.serving.api import SamplingParams
from hybridjax.structured import GrammarCompiler, GrammarLimits, Matcher

log = logging.getLogger(__name__)


class Grammars:
    """Makes matchers; the compiler behind them is made for the first one. Callable from any thread.

    Args:
      tokenizer: a hybridjax.text.Tokenizer, or None.
      vocab_size: of the model.
      eos_tokens: the model's end tokens.
      limits: what a grammar may cost.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_tokens: Sequence[int],
        limits: GrammarLimits | None = None,
    ):
        self._arguments = tokenizer, vocab_size, eos_tokens, limits
        self.available = grammars_available(tokenizer, vocab_size, eos_tokens)
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._closed = False

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """None without a grammar. Blocks while the grammar is compiled.

        Raises:
          RequestError: the grammar is wrong or too complex, or this engine has none.
          QueueFullError: too many grammars are being compiled.
        """
        grammar = params.grammar
        if grammar is None:
            return None
        if not self.available:
            raise RequestError(
                f"{grammar.field} needs an end token and known bytes of tokens, which this model has not",
                param=grammar.field,
                code="unsupported",
            )
        return self._get().matcher(
            grammar.kind,
            grammar.source,
            grammar.field,
            stop_tokens=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
        )

    def warm(self) -> None:
        """Prepares what the first grammar would wait for, if there can be one; a failure is only logged."""
        if self.available:
            try:
                self._get().warm()
            except (HybridJaxError, OSError):
                log.exception("structured output may not work")

    def close(self) -> None:
        """Ends the compiler; idempotent."""
        with self._lock:
            compiler, self._compiler, self._closed = self._compiler, None, True
        if compiler is not None:
            compiler.close()

    def _get(self) -> GrammarCompiler:
        with self._lock:
            if self._closed:
                raise HybridJaxError("the engine has been shut down")
            if self._compiler is None:
                self._compiler = GrammarCompiler(*self._arguments)
            return self._compiler


def grammars_available(tokenizer: Any, vocab_size: int, eos_tokens: Sequence[int]) -> bool:
    """Whether outputs can be held to grammars: the tokens' bytes are known, and one of them ends a text."""
    return GrammarCompiler.supports(tokenizer) and any(
        token < min(vocab_size, tokenizer.id_limit) for token in eos_tokens
    )
