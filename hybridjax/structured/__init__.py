"""Structured output: grammars compiled against a tokenizer, and masks of what may come next."""

from hybridjax.structured.compiler import GrammarCompiler as GrammarCompiler
from hybridjax.structured.compiler import GrammarLimits as GrammarLimits
from hybridjax.structured.matcher import Matcher as Matcher
