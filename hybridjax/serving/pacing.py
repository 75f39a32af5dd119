"""How much prefill comes between decode steps, learnt from measured times."""

import collections
from collections.abc import Sequence

# A new measurement's weight against all earlier ones.
_WEIGHT = 0.3
# Prefill is never put off for more than this many decode dispatches.
_MOST_DISPATCHES = 32
# How much longer than in the best shape a prefill tile may take in a smaller one: few tiles take nearly as
# long as many, since each step reads all weights.
_WASTE = 1.25


class Pace:
    """Bounds prefill's share of the device's time while requests decode.

    A prefill step is made so small that it takes no longer than the decode dispatch that it delays (times
    share / (1 - share)), if a compiled shape is that small and wastes no more than a quarter; what it takes
    beyond that is owed to decoding. Where more requests wait for a prompt than decode, those who decode count
    less: each request the same, whatever it waits for. Without measurements, prefill and decode steps
    alternate and prefill steps are as large as they can be.

    Args:
      share: of the time, in (0, 1); 1: no bound.
      sizes: tiles of the prefill shapes that exist, ascending.
    """

    def __init__(self, share: float, sizes: Sequence[int]):
        self._factor = (1 - share) / share
        self._sizes = tuple(sizes)
        self._prefill: dict[int, float] = {}
        self._decode: float | None = None
        self._debt = 0.0
        # Of steps under way, oldest first: tiles, what they were expected to take, and whom they delay; of
        # decoding, 0 and what it was counted as paying back.
        self._expected: collections.deque[tuple[int, float, float]] = collections.deque()

    @property
    def owes(self) -> bool:
        """Whether decoding should go first."""
        return self._debt > 0

    def tiles(self, most: int, delayed: float = 1.0) -> int:
        """Tiles of the next prefill step, at most ``most``.

        Args:
          delayed: requests that decode over those that wait for a prompt, at most 1; 0: nobody decodes.
        """
        factor = self._factor * delayed
        if self._decode is None or factor == 0:
            return most
        hoped = {size: self._hoped(size) for size in self._sizes if size <= most}
        seconds = {size: took for size, took in hoped.items() if took is not None}
        best = min((took / size for size, took in seconds.items()), default=0.0)
        efficient = [size for size, took in seconds.items() if took <= _WASTE * best * size]
        fitting = [size for size in efficient if seconds[size] * factor <= self._decode]
        return max(fitting, default=min(efficient, default=most))

    def launched(self, tiles: int, delayed: float = 1.0) -> None:
        """Notes a step that has been planned: of so many prefill tiles, or 0 for decoding.

        Args:
          delayed: as for ``tiles``.
        """
        if not tiles:
            paid = min(self._debt, self._decode or 0.0)
            self._expected.append((0, paid, 1.0))
            self._debt -= paid
            return
        expected = self._seconds(tiles)
        self._expected.append((tiles, expected, delayed))
        self._debt = self._debt if delayed else 0.0
        self._owe(expected * self._factor * delayed)

    def took(self, seconds: float) -> None:
        """Tells what the oldest step under way took; 0: unknown."""
        if not self._expected:
            return
        tiles, expected, delayed = self._expected.popleft()
        if seconds <= 0:
            return
        if tiles:
            size = self._size(tiles)
            self._prefill[size] = _average(self._prefill.get(size), seconds)
            counted = min(seconds, 4 * expected) if expected else seconds
            self._owe((counted - expected) * self._factor * delayed)
        else:
            self._decode = _average(self._decode, seconds)
            self._owe(expected - seconds if expected else 0.0)

    def keep(self, steps: int) -> None:
        """Drops the newest steps beyond so many, which are under way: they were planned, but not launched."""
        while len(self._expected) > steps:
            self._expected.pop()

    def forget_steps(self) -> None:
        """Drops what is under way: its results do not come."""
        self._expected.clear()
        self._debt = 0.0

    def _owe(self, seconds: float) -> None:
        self._debt = min(max(0.0, self._debt + seconds), _MOST_DISPATCHES * (self._decode or 0.0))

    def _size(self, tiles: int) -> int:
        """The shape that a step of so many tiles runs in."""
        return next((size for size in self._sizes if size >= tiles), self._sizes[-1])

    def _seconds(self, tiles: int) -> float:
        """What a step takes; per tile a large one takes no more than a small one: one slow sample passes."""
        size = self._size(tiles)
        least = 0.0 if size not in self._prefill else 1.0
        return min((took * max(least, size / s) for s, took in self._prefill.items()), default=0.0)

    def _hoped(self, size: int) -> float | None:
        """What a shape takes; of one that has not been seen the least that it can take, so that it is tried.

        None: too little is known. Shapes are tried one after the other, each once.
        """
        if size in self._prefill:
            return self._seconds(size)
        smaller = [s for s in self._sizes if s < size]
        if smaller and smaller[-1] in self._prefill:
            return self._seconds(smaller[-1])
        return min((took * size / s for s, took in self._prefill.items() if s > size), default=None)


def _average(old: float | None, new: float) -> float:
    # A step that compiled at first use took seconds; it may not count as much as it took.
    return new if old is None else old + _WEIGHT * (min(new, 4 * old) - old)
