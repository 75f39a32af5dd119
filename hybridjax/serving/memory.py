"""The state pools and the prefix cache together: free memory is handed out, then what is only cached."""

import collections
import math
from collections.abc import Iterable

from hybridjax.batch import TILE
from hybridjax.serving.pools import PagePool, PoolError, SlotPool
from hybridjax.serving.prefix_cache import Followed, Match, PrefixCache
from hybridjax.serving.request import Request


class StateMemory:
    """Hands out pages and slots and takes them back. Ids only; used by the scheduler's thread.

    Args:
      num_pages, num_slots: sizes of the pools, page 0 and slot 0 included.
      page_size: tokens per page.
      prefix_caching: keep the state of finished prompts for later ones.
    """

    def __init__(self, num_pages: int, num_slots: int, page_size: int, *, prefix_caching: bool):
        self.pages = PagePool(num_pages)
        self.slots = SlotPool(num_slots)
        self.page_size = page_size
        self.cache = PrefixCache(self.pages, self.slots, page_size) if prefix_caching else None
        # Of requests that hold nothing yet and were asked for.
        self._followed: dict[Request, Followed] = {}

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def cached_tokens(self, request: Request) -> int:
        """The tokens that ``match`` would find for a request that waits, often asked."""
        if self.cache is None or request.params.prompt_logprobs is not None:
            return 0
        followed = self._followed.get(request)
        if followed is None:
            followed = self._followed[request] = self.cache.follow(request.cache_ids, request.cache_salt)
        return followed.tokens

    def match(self, request: Request) -> Match:
        """What the cache knows of a prompt; see PrefixCache.match.

        Nothing if every token of the prompt has to be computed for its log probabilities.
        """
        if self.cache is None or request.params.prompt_logprobs is not None:
            return Match()
        return self.cache.match(request.cache_ids, request.cache_salt)

    def admit(self, request: Request, match: Match, tokens: int, spare: int) -> bool:
        """Gives a request a slot and the pages for ``tokens`` tokens, the matched ones among them.

        Args:
          request: holds nothing yet.
          match: what ``match`` has just found.
          tokens: prompt and what is known of the completion.
          spare: pages that must be left over.

        Returns:
          False if there is not enough: nothing is changed then, and nothing evicted in vain.
        """
        shared = list(match.pages)
        # Held first, so that making room for the rest cannot evict them.
        self.pages.share(shared)
        needed = self.pages_for(tokens) - len(shared)
        slot = self.obtain_slot() if self._obtainable(needed + spare) else None
        fresh = None if slot is None else self.obtain_pages(needed)
        if slot is None or fresh is None:
            self.pages.release(shared)
            if slot is not None:
                self.slots.release(slot)
            if self.cache is not None:
                self.cache.undo(match)
            return False
        request.pages, request.slot = shared + fresh, slot
        self._followed.pop(request, None)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Gives a request the pages that it lacks for ``tokens`` tokens; False if there are not enough."""
        missing = self.pages_for(tokens) - len(request.pages)
        fresh = self.obtain_pages(missing) if missing > 0 else []
        if fresh is None:
            return False
        request.pages += fresh
        return True

    def obtain_pages(self, count: int) -> list[int] | None:
        """Pages from the pool, or from what the cache can spare; None if that is not enough."""
        missing = count - self.pages.available
        if missing > 0 and self.cache is not None:
            self.cache.evict_pages(missing)
        return self.pages.allocate(count)

    def obtain_slot(self) -> int | None:
        """A free slot, or that of a snapshot that the cache can spare."""
        slot = self.slots.allocate()
        if slot is None and self.cache is not None and self.cache.evict_snapshot():
            slot = self.slots.allocate()
        return slot

    def wanted_snapshots(self, request: Request, match: Match, interval: int) -> list[int]:
        """Where later prompts will want to start: at the prompt's end, at a branch, sparsely between."""
        if self.cache is None:
            return []
        grid = math.lcm(self.page_size, TILE)
        end = (request.prompt_length - 1) // grid * grid
        branch = min(match.branch // grid * grid, end)
        return sorted(p for p in {end, branch, *range(0, end, interval)} if p > match.tokens)

    def take_snapshots(self, request: Request, end: int) -> tuple[tuple[int, int], ...]:
        """Slots for the snapshots wanted up to ``end``, as far as there are any."""
        taken = []
        while request.snapshots and request.snapshots[0] <= end:
            position = request.snapshots.pop(0)
            assert self.cache is not None
            if self.cache.has_snapshot(request.cache_ids, position, request.cache_salt):
                continue
            slot = self.obtain_slot()
            if slot is not None:
                request.pending_snapshots[position] = slot
                taken.append((position, slot))
        return tuple(taken)

    def release(self, request: Request) -> None:
        """Takes back all that a request holds.

        Steps that are still in flight may write to it; the device runs them before any step of its next
        owner.

        Raises:
          PoolError: the pools contradict the request, which holds nothing from now on.
        """
        pages, slot = request.pages, request.slot
        request.pages, request.slot = [], 0
        self._followed.pop(request, None)
        pending, request.pending_snapshots = request.pending_snapshots, {}
        if slot:
            self.pages.release(pages)
            for held in (slot, *pending.values()):
                self.slots.release(held)

    def flush(self) -> None:
        """Forgets every cached prefix; what requests hold is untouched."""
        if self.cache is not None:
            self.cache.flush()

    def rebuilt(self) -> "StateMemory":
        """Fresh pools of the same sizes."""
        return StateMemory(
            self.pages.capacity + 1,
            self.slots.capacity + 1,
            self.page_size,
            prefix_caching=self.cache is not None,
        )

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises PoolError unless pools, cache and all holders agree with each other. Modifies nothing."""
        requests = list(requests)
        self.pages.check_integrity()
        self.slots.check_integrity()
        slots = [slot for r in requests for slot in (r.slot, *r.pending_snapshots.values())]
        holders = collections.Counter(page for request in requests for page in request.pages)
        if self.cache is not None:
            self.cache.check_integrity()
            slots += self.cache.held_slots()
            holders.update(self.cache.held_pages())
        if len(set(slots)) != len(slots) or len(slots) + self.slots.available != self.slots.capacity:
            raise PoolError("slots in use and free slots do not add up")
        if len(holders) + self.pages.available != self.pages.capacity:
            raise PoolError("pages in use and free pages do not add up")
        for page, count in holders.items():
            if self.pages.references(page) != count:
                raise PoolError(f"page {page} has {self.pages.references(page)} references, {count} holders")

    def _obtainable(self, count: int) -> bool:
        """Whether so many pages are free or held by the cache only."""
        missing = count - self.pages.available
        return missing <= 0 or (self.cache is not None and self.cache.num_evictable_pages >= missing)
