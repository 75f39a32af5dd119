"""Requests that have not had their last event, and calls between steps: who may act on them, and when.

Two threads can end a request: the engine's, and the watchdog's when the engine's hangs. The rule for both:
whoever takes an entry (or a call) out, under the lock, gives it its last event (or its answer).
"""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

from hybridjax.serving.api import OnOutput, RequestOutput
from hybridjax.serving.output import OutputProcessor
from hybridjax.serving.request import Request

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, frozen=True)
class Entry:
    """An accepted request and where its events go."""

    request: Request
    processor: OutputProcessor
    on_output: OnOutput


class LiveRequests:
    """Entries by request id, until their last events.

    A callback is never called by two threads at a time, and never after its last event. So a request whose
    callback is being called when everything is given up has its last event from the thread that is in there.

    Args:
      lock: reentrant; guards everything here, and may guard more.
    """

    def __init__(self, lock: threading.Condition):
        self._lock = lock
        self._entries: dict[str, Entry] = {}
        self._called: Entry | None = None
        self._given_up: str | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, entries: Sequence[Entry]) -> None:
        """Adds entries whose ids are not in use."""
        with self._lock:
            self._entries.update({entry.request.request_id: entry for entry in entries})

    def named(self, request_id: str) -> Entry | None:
        """The entry with an id."""
        return self._entries.get(request_id)

    def find(self, request: Request) -> Entry | None:
        """A request's entry; None if it has ended, also if its id is in use again."""
        entry = self._entries.get(request.request_id)
        return entry if entry is not None and entry.request is request else None

    def all(self) -> list[Entry]:
        """Every entry."""
        with self._lock:
            return list(self._entries.values())

    def take(self, entry: Entry) -> bool:
        """Takes an entry out; if it was in (True), its last event is the caller's to give (``tell_last``)."""
        with self._lock:
            if self._entries.get(entry.request.request_id) is not entry:
                return False
            del self._entries[entry.request.request_id]
            return True

    def tell(self, entry: Entry, event: RequestOutput) -> None:
        """Emits an event that is not the last one, unless the entry has been taken out meanwhile."""
        with self._lock:
            if self._entries.get(entry.request.request_id) is not entry:
                return
            self._called = entry
        _call(entry, event)
        with self._lock:
            self._called = None
            given_up = self._given_up
        if given_up is not None and self.take(entry):
            self.tell_last(entry, entry.processor.end("error", given_up))

    def tell_last(self, entry: Entry, event: RequestOutput) -> None:
        """Emits the last event of an entry that the caller has taken out."""
        _call(entry, event)

    def give_up(self, why: str) -> None:
        """Ends every request with an error in place of the engine's thread, which hangs or soon gets nowhere.

        If it hangs in a request's callback, that request can be told nothing until it comes back.
        """
        with self._lock:
            self._given_up = why
            entries = [entry for entry in self._entries.values() if entry is not self._called]
            for entry in entries:
                del self._entries[entry.request.request_id]
        for entry in entries:
            self.tell_last(entry, entry.processor.end("error", why))


class Calls:
    """What other threads want done by the thread that owns something, when it is ready for it.

    Args:
      lock: reentrant, shared with whoever decides whether calls are still taken.
    """

    def __init__(self, lock: threading.Condition):
        self._lock = lock
        self._queue: collections.deque[tuple[Callable[[], None], concurrent.futures.Future[None]]]
        self._queue = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, call: Callable[[], None]) -> "concurrent.futures.Future[None]":
        """Queues a call; the future has its end."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            self._queue.append((call, done))
        return done

    def run(self) -> None:
        """Makes the calls that are queued now and answers them. A call stays queued until it has returned."""
        for _ in range(len(self._queue)):
            with self._lock:
                if not self._queue:
                    return
                call, done = first = self._queue[0]
            problem: BaseException | None = None
            try:
                call()
            except BaseException as error:  # whatever it is, somebody waits for it
                problem = error
            with self._lock:
                if not self._queue or self._queue[0] is not first:
                    return  # refused meanwhile
                self._queue.popleft()
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(problem)

    def refuse(self, problem: Exception) -> None:
        """Answers every call with an error, also one that is being made."""
        with self._lock:
            refused, self._queue = self._queue, collections.deque()
        for _, done in refused:
            done.set_exception(problem)


def _call(entry: Entry, event: RequestOutput) -> None:
    # Also what is meant to end a thread or a task: this one is not the callback's to end.
    try:
        entry.on_output(event)
    except BaseException:
        logger.exception("on_output of request %s has raised", entry.request.request_id)
