from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from http_fakes import FakeEngine, RunningServer

Serve = Callable[..., RunningServer]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.shutdown()


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Serve]:
    """Starts servers; afterwards nothing may be left running, and nothing may have ended twice."""
    servers: list[RunningServer] = []

    def start(**config: object) -> RunningServer:
        servers.append(RunningServer(engine, **config))
        return servers[-1]

    yield start
    for server in servers:
        if server.thread.is_alive():
            server.settle()
            server.stop()
    engine.wait_until(lambda: not engine.live)
    assert engine.ends == dict.fromkeys(engine.submitted, 1)
    assert set(engine.aborts.values()) <= {1}


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    return serve()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
