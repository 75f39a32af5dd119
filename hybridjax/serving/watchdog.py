"""Notices an engine that no longer gets on, for instance inside a device call that never returns."""

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

# How often the engine is looked at within the timeout.
LOOKS = 20
LONGEST_WAIT = 5.0


class Watched(Protocol):
    """An engine with a pulse; thread-safe."""

    @property
    def pulse(self) -> int | None:
        """A number that changes whenever the engine gets on; None while it may take its time: it waits
        for work, compiles, or has ended."""
        ...

    def give_up(self, why: str) -> None:
        """Ends every request with an error and takes no more."""
        ...


class Watchdog:
    """A thread that gives an engine up once it has made no progress for ``timeout`` seconds.

    The time is counted in looks at the engine, not read from a clock: a process that was stopped and
    continued has not hung.

    Args:
      watched: an engine.
      timeout: seconds.
      on_hang: called once, at the end of the watchdog's thread, after every request has been told.
    """

    def __init__(self, watched: Watched, timeout: float, on_hang: Callable[[], None] = lambda: None):
        self._watched = watched
        self._timeout = timeout
        self._on_hang = on_hang
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybridjax-watchdog", daemon=True)

    def start(self) -> None:
        """Starts watching."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; idempotent. From within ``on_hang`` it does not wait."""
        self._stopped.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        pause = min(self._timeout / LOOKS, LONGEST_WAIT)
        last, stalled = None, 0.0
        while not self._stopped.wait(pause):
            pulse = self._watched.pulse
            stalled = stalled + pause if pulse is not None and pulse == last else 0.0
            last = pulse
            if stalled >= self._timeout:
                self._bark()
                return

    def _bark(self) -> None:
        why = f"the engine has made no progress for {self._timeout:g} seconds"
        logger.critical("%s; what every thread is doing:\n%s", why, stacks())
        try:
            self._watched.give_up(why)
        except Exception:
            logger.exception("the requests could not all be told")
        self._on_hang()


def stacks() -> str:
    """The stack of every thread."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            parts.append(f"Thread {thread.name!r}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
