import pytest
from grammar_walks import EOS

from hybridjax.checkpoints import resolve
from hybridjax.structured import GrammarCompiler
from hybridjax.text import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(resolve("tiny-sala"))


@pytest.fixture(scope="session")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS)
    yield compiler
    compiler.close()
