"""The requests that wait for admission, and in which order they are tried."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from hybridjax.serving.request import Request

POLICIES = ("fcfs", "lpm")

# Longest-prefix matching looks at this many requests, the first in order of arrival.
_MATCHED = 128
# Prompt tokens that are looked up for the first time in one call; decoding waits meanwhile.
_NEW_TOKENS = 2**17
# The first request is passed over this many times at most.
_PATIENCE = 64


class WaitingQueue:
    """Requests in order of arrival, a preempted one at its old place.

    Args:
      policy: "fcfs": first come, first served; "lpm": those with the longest cached prefix first.
      priorities: higher ``Request.priority`` before everything else.
      cached_tokens: how long a request's cached prefix is; read by "lpm".
    """

    def __init__(self, policy: str, *, priorities: bool, cached_tokens: Callable[[Request], int]):
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self._policy, self._priorities, self._cached_tokens = policy, priorities, cached_tokens
        self._serial = itertools.count()
        # A request keeps its number until it is forgotten, so that it can come back.
        self._numbers: dict[Request, int] = {}
        self._order: list[tuple[int, int, Request]] = []
        # How often a request that was the earliest has been passed over.
        self._passed: dict[Request, int] = {}
        self._looked_up: set[Request] = set()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """In order of priority and arrival."""
        return (request for _, _, request in self._order)

    def add(self, request: Request) -> None:
        """Puts a request to the end of its priority, or where it had been before."""
        number = self._numbers.setdefault(request, next(self._serial))
        bisect.insort(self._order, (*self._rank(request, number), request))

    def remove(self, request: Request) -> bool:
        """Takes a request out; whether it was in."""
        number = self._numbers.get(request)
        if number is None:
            return False
        rank = self._rank(request, number)
        index = bisect.bisect_left(self._order, rank, key=lambda entry: entry[:2])
        if index == len(self._order) or self._order[index][2] is not request:
            return False
        del self._order[index]
        self._looked_up.discard(request)
        return True

    def forget(self, request: Request) -> None:
        """Ends a request's stay: it does not come back."""
        self.remove(request)
        self._numbers.pop(request, None)
        self._passed.pop(request, None)

    def number(self, request: Request) -> int:
        """Which request it was, counting all that were ever added and not forgotten."""
        return self._numbers[request]

    def first(self) -> Request | None:
        """The request to try next."""
        if not self._order:
            return None
        top, _, earliest = self._order[0]
        if self._policy == "fcfs" or self._passed.get(earliest, 0) >= _PATIENCE:
            return earliest
        candidates, room = [], _NEW_TOKENS
        for rank, _, request in self._order[:_MATCHED]:
            if rank != top:
                break
            if request not in self._looked_up:
                if room <= 0:
                    continue
                room -= len(request.prompt_ids)
                self._looked_up.add(request)
            candidates.append(request)
        # max keeps the first of equals, which came first.
        return max(candidates, key=self._cached_tokens)

    def take(self, request: Request) -> None:
        """Removes a request that is being admitted, and notes whether the earliest was passed over."""
        earliest = self._order[0][2]
        if request is not earliest:
            self._passed[earliest] = self._passed.get(earliest, 0) + 1
        self._passed.pop(request, None)
        self.remove(request)

    def _rank(self, request: Request, number: int) -> tuple[int, int]:
        return -request.priority if self._priorities else 0, number
