"""The parent's side of sandbox_process.py."""

import json
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hybridjax.errors import HybridJaxError, QueueFullError

_SCRIPT = Path(__file__).with_name("sandbox_process.py")
_START_SECONDS = 120.0
MAX_WAITING = 8


class SandboxError(Exception):
    """The process hung or died over a grammar and has been ended."""


class Sandbox:
    """A process that tries grammars out, one at a time; started when needed, again after a failure.

    Args:
      rules: the process's set-up, see sandbox_process.py.
      seconds: that a grammar may take.
    """

    def __init__(self, rules: dict[str, Any], seconds: int):
        self._rules = json.dumps(rules | {"seconds": seconds}).encode()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process, which is otherwise done for the first grammar."""
        with self._lock:
            self._ensure()

    def problem_of(self, grammar: str) -> str | None:
        """What is wrong with a grammar, None if nothing. Callable from any thread; blocks.

        Raises:
          SandboxError: trying it out took too long, too much memory, or crashed.
          QueueFullError: too many others wait, or are being tried out for too long.
        """
        # Each waiting grammar holds a thread of the server's, which others need.
        if not self._places.acquire(blocking=False):
            raise QueueFullError("too many new grammars are waiting to be compiled")
        try:
            return self._try_out(grammar)
        finally:
            self._places.release()

    def _try_out(self, grammar: str) -> str | None:
        if not self._lock.acquire(timeout=2 * self._seconds):
            raise QueueFullError("new grammars are taking too long to compile")
        try:
            process = self._ensure()
            try:
                _write(process, json.dumps(grammar).encode())
                answer = _read(process, self._seconds)
            except (OSError, EOFError, TimeoutError) as error:
                self._end()
                self._check_open()
                raise SandboxError(str(error)) from error
            return json.loads(answer)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process; idempotent. What is being tried out fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ensure(self) -> subprocess.Popen[bytes]:
        self._check_open()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        # -P keeps the script's directory out of the module path; a session of its own, Ctrl-C away from it.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            _write(process, self._rules)
            _read(process, _START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise HybridJaxError(f"the process for new grammars could not be started: {error}") from error
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise HybridJaxError("grammars are no longer compiled: the engine has been shut down")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # unsent bytes of a process that has died


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(struct.pack("<I", len(data)) + data)
    process.stdin.flush()


def _read(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next frame; raises TimeoutError or EOFError."""
    assert process.stdout is not None
    descriptor, deadline, data = process.stdout.fileno(), time.monotonic() + seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(data) < 4 or len(data) < 4 + struct.unpack("<I", data[:4])[0]:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise TimeoutError(f"no answer within {seconds:g} s")
            piece = os.read(descriptor, 2**16)
            if not piece:
                raise EOFError("the process has died")
            data += piece
    return data[4:]
