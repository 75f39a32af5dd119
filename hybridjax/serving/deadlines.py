"""When requests end unfinished."""

import heapq
import itertools

from hybridjax.serving.request import Request


class Deadlines:
    """Points in time of requests, forgotten when the request ends: a deadline may be a day ahead.

    A request may have one for its end and one for its first admission.
    """

    def __init__(self):
        self._serial = itertools.count()
        self._heap: list[tuple[float, int]] = []
        self._timers: dict[int, tuple[Request, bool]] = {}
        self._of: dict[Request, list[int]] = {}

    def add(self, due: float, request: Request, *, only_waiting: bool = False) -> None:
        """Adds a point in time; ``only_waiting``: it means nothing once the request has been admitted."""
        serial = next(self._serial)
        heapq.heappush(self._heap, (due, serial))
        self._timers[serial] = request, only_waiting
        self._of.setdefault(request, []).append(serial)

    def forget(self, request: Request) -> None:
        """Drops whatever was added for a request."""
        for serial in self._of.pop(request, ()):
            self._timers.pop(serial, None)
        if len(self._heap) > 2 * len(self._timers) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._timers]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[Request]:
        """Requests whose time has come; each point in time is told once."""
        found: dict[Request, None] = {}
        while self._heap and self._heap[0][0] <= now:
            _, serial = heapq.heappop(self._heap)
            request, only_waiting = self._timers.pop(serial, (None, False))
            if request is not None and not (only_waiting and request.admitted is not None):
                found[request] = None
        return list(found)
