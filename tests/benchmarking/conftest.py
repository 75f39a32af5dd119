import pytest
from benchmarking_fakes import FakeServer

from hybridjax.checkpoints import resolve
from hybridjax.text import load_tokenizer


@pytest.fixture
def fake():
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(resolve("tiny-sala"))
