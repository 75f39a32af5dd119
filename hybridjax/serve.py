"""``python -m hybridjax.serve``: the OpenAI-compatible server."""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridjax.configs.flags import add_flags, from_flags
from hybridjax.configs.serving import EngineConfig, ServerConfig, secret_fields
from hybridjax.errors import ConfigError, HybridJaxError
from hybridjax.serving.http.app import create_app
from hybridjax.serving.http.server import HttpServer, listen, reserve
from hybridjax.serving.watchdog import Watchdog

logger = logging.getLogger("hybridjax.serve")

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# EX_TEMPFAIL: a supervisor shall start the server again.
EXIT_HUNG = 75
# Seconds for clients to be told that their requests have failed.
LAST_WORDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns:
      0 after a drain, 2 when a setting, the checkpoint or the port cannot work. A hung engine ends the
      process with EXIT_HUNG.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hybridjax.serve",
        description="Serves a model through the OpenAI API.",
        allow_abbrev=False,
    )
    add_flags(parser, ServerConfig)
    namespace = parser.parse_args(argv)
    try:
        config = with_secrets(from_flags(ServerConfig, namespace), os.environ)
        return run(config, build_engine)
    except HybridJaxError as error:
        print(f"hybridjax.serve: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def with_secrets(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Takes the keys that no flag gives from HYBRIDJAX_API_KEY and HYBRIDJAX_ADMIN_API_KEY."""
    found = {name: environment.get(f"HYBRIDJAX_{name.upper()}") for name in secret_fields(ServerConfig)}
    missing = {name: value for name, value in found.items() if value and getattr(config, name) is None}
    return dataclasses.replace(config, **missing)


def build_engine(config: ServerConfig) -> Any:
    # Everything that can be said about the flags is said before jax is imported.
    from hybridjax.serving import Engine

    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
    return Engine(fields.pop("model_path"), **fields)


def run(config: ServerConfig, make_engine: Callable[[ServerConfig], Any]) -> int:
    """Reserves the port, builds the engine, opens the port, serves, drains, shuts the engine down."""
    level = getattr(logging, config.log_level.upper())
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # JAX reports every backend that it did not find.
    logging.getLogger("jax").setLevel(max(level, logging.WARNING))
    if config.log_requests:
        _log_requests()
    if config.chat_template and not Path(config.chat_template).is_file():
        raise ConfigError(f"chat_template is {config.chat_template!r}; it must be a file")
    if config.chat_template and config.skip_tokenizer_init:
        raise ConfigError("chat_template is set; it must be left out together with skip_tokenizer_init")
    with reserve(config.host, config.port) as sock:
        tokenizer = _tokenizer_with_template(config) if config.chat_template else None
        engine = make_engine(config)
        with _watched(engine, config.watchdog_timeout):
            try:
                tokenizer = tokenizer or engine.tokenizer
                app = create_app(engine, tokenizer, config)
                listen(sock)
                name = config.served_model_name or engine.info.model_name
                server = HttpServer(app, config, on_ready=lambda: _announce(sock, name, tokenizer, config))
                server.run(sockets=[sock])
            finally:
                engine.shutdown()
    return 0


@contextlib.contextmanager
def _watched(engine: Any, timeout: float) -> Iterator[None]:
    """Ends the process when the engine hangs: nothing else gets a thread out of a device call."""
    if not timeout:
        yield
        return

    def end() -> None:
        time.sleep(LAST_WORDS)
        logger.critical("ending the process with status %d", EXIT_HUNG)
        logging.shutdown()
        os._exit(EXIT_HUNG)

    watchdog = Watchdog(engine, timeout, end)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def _log_requests() -> None:
    requests = logging.getLogger("hybridjax.requests")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    requests.addHandler(handler)
    requests.setLevel(logging.INFO)
    # The lines are for machines: bare, and there whatever log_level says.
    requests.propagate = False


def _tokenizer_with_template(config: ServerConfig) -> Any:
    from hybridjax.checkpoints import resolve
    from hybridjax.text import load_tokenizer

    path = config.tokenizer_path or resolve(config.model_path)
    return load_tokenizer(path, Path(config.chat_template or ""))


def _announce(sock: socket.socket, name: str, tokenizer: Any, config: ServerConfig) -> None:
    host, port = sock.getsockname()[:2]
    if host not in LOOPBACK and config.api_key is None:
        logger.warning("anybody who can reach %s may use this server; there is no --api-key", host)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    path, body = "/v1/completions", {"model": name, "prompt": [1, 2, 3], "max_tokens": 32}
    if tokenizer is not None:
        body["prompt"] = "Once upon a time"
        if tokenizer.has_chat_template:
            path = "/v1/chat/completions"
            body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    example = shlex.quote(json.dumps(body))
    key = '-H "Authorization: Bearer $HYBRIDJAX_API_KEY" ' if config.api_key else ""
    print(f"hybridjax is ready: {name} at {url}", flush=True)
    print(f"curl {url}{path} -H 'Content-Type: application/json' {key}-d {example}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
