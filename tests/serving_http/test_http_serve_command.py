import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from http_fakes import PATIENCE, FakeEngine

from hybridjax import serve as command
from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.serving.http.server import listen, reserve

HERE = Path(__file__).parent
CHECKPOINT = HERE.parent / "goldens" / "minicpm_sala" / "dense"
CPU = {"JAX_PLATFORMS": "cpu"}


class Process:
    """The command in a process of its own, started and announced."""

    def __init__(self, *flags: str, command: Sequence[str] = (str(HERE / "serve_fake_engine.py"),)):
        line = [sys.executable, *command, "--port", "0", *flags]
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **CPU}
        )
        assert self.process.stdout is not None
        self.engine_line = self.process.stdout.readline().strip() if command[0] != "-m" else ""
        self.ready_line = self.process.stdout.readline().strip()
        self.example = self.process.stdout.readline().strip()
        self.url = self.ready_line.rpartition(" ")[2]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(*flags: str, **how: Any) -> Process:
        processes.append(Process(*flags, **how))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


def test_the_ready_line_and_the_example_work(start: Callable[..., Process]):
    server = start("--served-model-name", "it's", "--page-size", "128", "--model", "some/model")
    assert server.engine_line == "engine some/model 128 False"
    assert re.fullmatch(r"hybridjax is ready: it's at http://127\.0\.0\.1:\d+", server.ready_line)
    words = shlex.split(server.example)
    assert words[:4] == ["curl", server.url + "/v1/chat/completions", "-H", "Content-Type: application/json"]
    body = json.loads(words[words.index("-d") + 1])
    reply = httpx.post(words[1], json=body, timeout=PATIENCE).json()
    assert reply["model"] == "it's"
    assert reply["usage"]["completion_tokens"] == 32
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end()
    assert (code, out) == (0, "engine is shut down\n")
    assert "SIGTERM: no new requests" in err
    assert "POST /v1/chat/completions 200" in err
    assert "Traceback" not in err


def first_event(server: Process, **body: Any) -> tuple[httpx.Client, Any, Iterator[str]]:
    client = httpx.Client(base_url=server.url, timeout=PATIENCE)
    stream = client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **body})
    lines = stream.__enter__().iter_lines()
    assert next(lines).startswith("data: {")
    return client, stream, lines


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_aborts_what_outlasts_the_drain(start: Callable[..., Process], sig: signal.Signals):
    server = start("--drain-timeout", "0.05")
    client, stream, lines = first_event(server, max_tokens=10**6 // 2)
    server.process.send_signal(sig)
    text = "".join(lines)
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]")
    stream.__exit__(None, None, None)
    client.close()
    code, out, err = server.end()
    assert (code, out) == (0, "engine is shut down\n")
    assert "drain timeout: aborted 1 completions" in err


def test_a_second_signal_ends_the_process_at_once(start: Callable[..., Process]):
    server = start("--drain-timeout", "3600")
    client, stream, lines = first_event(server, max_tokens=10**6 // 2)
    server.process.send_signal(signal.SIGTERM)
    # The first signal has been taken once new requests are refused.
    while httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 200:
        next(lines)
    server.process.send_signal(signal.SIGTERM)
    code, out, _ = server.end()
    assert (code, out) == (128 + signal.SIGTERM, "")
    stream.__exit__(None, None, None)
    client.close()


def run_command(*flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "hybridjax.serve", *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **CPU})


def test_a_bad_flag_exits_with_2():
    done = run_command("--bad-flag")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: unrecognized arguments: --bad-flag")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "port is 70000; it must be in 0..65535"),
        (["--page-size", "0"], "page_size is 0; it must be a positive integer"),
        (["--max-request-bytes", "-1"], "max_request_bytes is -1; it must be a positive integer"),
        (["--chat-template", "/nowhere"], "chat_template is '/nowhere'; it must be a file"),
        (
            ["--host", "no.such.host.invalid"],
            "host is 'no.such.host.invalid'; it must be an address of this machine",
        ),
        (["--host", "192.0.2.1"], "port is 30000; it cannot be opened on 192.0.2.1: Cannot assign"),
    ],
)
def test_a_bad_setting_exits_with_2_and_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "build_engine", lambda config: pytest.fail("the engine was built"))
    assert command.main(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hybridjax.serve: error: " + message)


def test_a_port_in_use_is_told_before_the_engine_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "build_engine", lambda config: pytest.fail("the engine was built"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main(["--port", str(port)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line
        == f"hybridjax.serve: error: port is {port}; it cannot be opened on 127.0.0.1: Address already in use"
    )


def test_a_port_taken_while_the_engine_was_built_is_told():
    first, second = reserve("127.0.0.1", 0), None
    second = reserve("127.0.0.1", first.getsockname()[1])
    with first, second:
        listen(first)
        with pytest.raises(ConfigError, match="Address already in use"):
            listen(second)


def test_a_bad_checkpoint_exits_with_2_before_the_port_opens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    port = 0
    reserve_port = command.reserve

    def remember(host: str, wanted: int) -> socket.socket:
        nonlocal port
        sock = reserve_port(host, wanted)
        port = sock.getsockname()[1]
        return sock

    def fail(config: ServerConfig) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        raise CheckpointError("/x: no such directory;\n  it must hold config.json")

    monkeypatch.setattr(command, "reserve", remember)
    monkeypatch.setattr(command, "build_engine", fail)
    assert command.main(["--port", "0", "--model-path", "/x"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "hybridjax.serve: error: /x: no such directory; it must hold config.json"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_an_engine_is_shut_down_when_the_server_cannot_start(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine()
    rival: list[socket.socket] = []
    reserve_port = command.reserve

    def contested(host: str, port: int) -> socket.socket:
        sock = reserve_port(host, port)
        rival.append(reserve_port(host, sock.getsockname()[1]))
        listen(rival[0])
        return sock

    monkeypatch.setattr(command, "reserve", contested)
    with pytest.raises(ConfigError):
        command.run(ServerConfig(port=0), lambda config: engine)
    rival[0].close()
    assert not engine._thread.is_alive()


def test_the_chat_template_needs_a_tokenizer(tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    config = ServerConfig(chat_template=str(template), skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        command.run(config, lambda config: pytest.fail("the engine was built"))


def test_the_help_shows_flags_and_defaults():
    done = run_command("--help")
    assert done.returncode == 0
    assert "--mem-fraction-static" in done.stdout
    assert "(default: 30000)" in done.stdout


def write_tokenizer(directory: Path) -> None:
    """One token per printable ASCII character."""
    characters = {chr(code): code - 32 for code in range(32, 127)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(characters, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(directory / "tokenizer.json"))


def test_a_given_chat_template_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_tokenizer(tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text("hey {{ messages[0].content }}")
    engine = FakeEngine()
    sent: list[Any] = []

    def chat(sock: socket.socket, name: str, tokenizer: Any, config: ServerConfig) -> None:
        sent.append(tokenizer.render_chat([{"role": "user", "content": "you"}]))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "_announce", chat)
    monkeypatch.setattr(command, "build_engine", lambda config: engine)
    flags = ["--port", "0", "--chat-template", str(template), "--model-path", str(tmp_path)]
    assert command.main(flags) == 0
    assert sent == ["hey you"]
    assert not engine._thread.is_alive()


def test_a_broken_chat_template_exits_with_2_before_the_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_tokenizer(tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text("{% if %}")
    monkeypatch.setattr(command, "build_engine", lambda config: pytest.fail("the engine was built"))
    flags = ["--port", "0", "--chat-template", str(template), "--model-path", str(tmp_path)]
    assert command.main(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "chat template, line 1" in line


def test_a_missing_model_exits_with_2_and_one_line():
    done = run_command("--port", "0", "--model-path", "/no/such/model")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("hybridjax.serve: error: '/no/such/model' is neither a directory nor")


def test_a_real_model_chats_streams_stops_and_ends(start: Callable[..., Process], tmp_path: Path):
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    write_tokenizer(tmp_path)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    flags = ["--model-path", str(tmp_path), "--served-model-name", "real", "--skip-server-warmup"]
    server = start(*flags, "--compilation-cache-dir", "", command=("-m", "hybridjax.serve"))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        chat = {"model": "real", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
        chat |= {"max_tokens": 24, "extra_body": {"ignore_eos": True}}
        whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content or ""
        assert whole.usage is not None and whole.usage.completion_tokens == 24
        assert whole.usage.prompt_tokens == len("user: Hi ")
        assert whole.choices[0].logprobs is not None
        tokens = whole.choices[0].logprobs.content or []
        assert "".join(token.token for token in tokens) == text
        assert all(token.top_logprobs[0].token == token.token for token in tokens)
        streamed = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
        stop = text[12:14]
        stopped = client.chat.completions.create(**chat, stop=stop).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(stop)], "stop")
        endless = client.chat.completions.create(**(chat | {"max_tokens": 3000}), stream=True)
        next(iter(endless))
        endless.close()
    server.process.send_signal(signal.SIGTERM)
    code, _, err = server.end()
    assert code == 0
    assert "the client went away" in err
    assert "aborted 1 of 1" in err
    assert "Traceback" not in err
