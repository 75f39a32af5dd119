"""Who holds which page and which slot. Ids only: the memory itself is on the device, never cleared.

Id 0 of either pool belongs to nobody and is never handed out.
"""

from collections.abc import Iterable, Sequence

from hybridjax.errors import HybridJaxError


class PoolError(HybridJaxError):
    """A pool was used wrongly or contradicts itself: always a bug of the caller, never of a user."""


class PagePool:
    """Reference-counted page ids 1 .. num_pages - 1."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise PoolError(f"a page pool needs at least 2 pages, page 0 is nobody's; got {num_pages}")
        self._references = [0] * num_pages
        self._cached = [False] * num_pages
        self._num_idle = 0
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all."""
        return len(self._references) - 1

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Cached pages (see ``cache``) that nobody else holds."""
        return self._num_idle

    def references(self, page: int) -> int:
        """How many holders a page has, 0 if it is free."""
        return self._references[page]

    def others(self, page: int) -> int:
        """How many holders a page has beside the prefix cache."""
        return self._references[page] - self._cached[page]

    def cache(self, page: int) -> None:
        """Adds the prefix cache's reference, of which a page has at most one.

        Raises:
          PoolError: the page is not held or has one already; nothing has been changed.
        """
        self._check_held([page])
        if self._cached[page]:
            raise PoolError(f"page {page} is cached already")
        self._cached[page] = True
        self._references[page] += 1

    def uncache(self, page: int) -> None:
        """Drops the prefix cache's reference.

        Raises:
          PoolError: the page has none; nothing has been changed.
        """
        self._check_held([page])
        if not self._cached[page]:
            raise PoolError(f"page {page} is not cached")
        self._cached[page] = False
        self._num_idle -= self._references[page] == 1
        self._drop(page)

    def allocate(self, count: int) -> list[int] | None:
        """Hands out ``count`` distinct free pages with one reference each, or None if there are fewer.

        Modifies the pool unless it returns None.
        """
        if count < 0:
            raise PoolError(f"cannot allocate {count} pages")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of the pages, which must be held.

        Raises:
          PoolError: a page is not held; nothing has been changed.
        """
        pages = list(pages)
        self._check_held(pages)
        for page in pages:
            self._num_idle -= self._cached[page] and self._references[page] == 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference to each of the pages; those without any left are free again.

        Raises:
          PoolError: a page is not held (a double free), held by the cache only, or named twice; nothing has
            been changed.
        """
        pages = list(pages)
        self._check_held(pages)
        for page in pages:
            if self._cached[page] and self._references[page] == 1:
                raise PoolError(f"page {page} is held by the prefix cache only")
        for page in pages:
            self._drop(page)
            self._num_idle += self._cached[page] and self._references[page] == 1

    def check_integrity(self) -> None:
        """Raises PoolError unless every page is either free or held. Modifies nothing."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolError("a page is free twice")
        if not free <= set(range(1, len(self._references))):
            raise PoolError("page 0 or an unknown page is free")
        for page, references in enumerate(self._references):
            expected_free = page != 0 and references == 0
            if references < 0 or (page == 0 and references) or (page in free) != expected_free:
                raise PoolError(f"page {page} has {references} references, free: {page in free}")
            if self._cached[page] and not references:
                raise PoolError(f"page {page} is cached but not held")
        idle = sum(cached and n == 1 for cached, n in zip(self._cached, self._references))
        if idle != self._num_idle:
            raise PoolError(f"{idle} pages are held by the cache only, not {self._num_idle}")

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def _check_held(self, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages):
            raise PoolError("the same page is named twice")
        for page in pages:
            if not 0 < page < len(self._references) or self._references[page] == 0:
                raise PoolError(f"page {page} is not held by anybody")


class SlotPool:
    """State slot ids 1 .. num_slots - 1, each with at most one holder."""

    def __init__(self, num_slots: int):
        if num_slots < 2:
            raise PoolError(f"a slot pool needs at least 2 slots, slot 0 is nobody's; got {num_slots}")
        self._held = [False] * num_slots
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Slots that can be handed out at all."""
        return len(self._held) - 1

    @property
    def available(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def allocate(self) -> int | None:
        """Hands out a free slot, or returns None if there is none. Modifies the pool in the first case."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Takes a slot back.

        Raises:
          PoolError: the slot is not held (a double free); nothing has been changed.
        """
        if not 0 < slot < len(self._held) or not self._held[slot]:
            raise PoolError(f"slot {slot} is not held by anybody")
        self._held[slot] = False
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Raises PoolError unless every slot is either free or held. Modifies nothing."""
        expected = [slot for slot, held in enumerate(self._held) if slot and not held]
        if self._held[0] or sorted(self._free) != expected:
            raise PoolError("the free slots are not those that nobody holds")
