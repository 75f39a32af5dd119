"""From queues and pools to the next plan. Plain Python without a device, driven by one thread.

First come, first served. A request is admitted when a slot and the pages for its whole prompt and
completion are free, so a running request never waits for memory; nobody overtakes a request that
does not fit yet. Prefill and decode steps alternate while there is work for both, which bounds how
long a prompt can hold up the running requests.

With a prefix cache, an admitted request starts behind the longest prefix whose state is known, and
leaves its own prompt's pages and some snapshots of its state to later ones; pages and snapshots that
nobody uses are evicted when a request needs their place.

Lengths advance twice, because a step is launched before the previous one has been read:
``next_plan`` advances ``scheduled``, ``confirm`` advances ``computed``.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable

from hybridjax.batch import TILE
from hybridjax.serving.api import FinishReason
from hybridjax.serving.plan import DecodePlan, DecodeRow, Plan, PrefillPlan, PrefillRow
from hybridjax.serving.pools import PagePool, PoolError, SlotPool
from hybridjax.serving.prefix_cache import Match, PrefixCache
from hybridjax.serving.request import Request


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of queues and pools; ``longest_wait`` is the first waiting request's, in seconds."""

    waiting: int
    prefilling: int
    running: int
    free_pages: int
    free_slots: int
    longest_wait: float


class Scheduler:
    """Owns the queues, the pools and every accepted request's lengths, pages and slot.

    Args:
      num_pages, num_slots: sizes of the pools, page 0 and slot 0 included.
      page_size: tokens per page.
      max_running: requests that are admitted at a time.
      max_prefill_tiles: 64-row tiles of the largest prefill step.
      chunked_prefill_size: tokens of a prefill step, rounded to pages and tiles; -1: as many as fit.
      num_decode_steps: most steps per decode dispatch.
      prefix_caching: keep the state of finished prompts for later ones.
      snapshot_interval: tokens between the snapshots along a long prompt, a multiple of pages and tiles.
      clock: seconds, only differences matter.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        page_size: int,
        max_running: int,
        max_prefill_tiles: int,
        chunked_prefill_size: int = -1,
        num_decode_steps: int = 1,
        prefix_caching: bool = False,
        snapshot_interval: int = 8192,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.pages = PagePool(num_pages)
        self.slots = SlotPool(num_slots)
        self.page_size = page_size
        self.cache = PrefixCache(self.pages, self.slots, page_size) if prefix_caching else None
        self.snapshot_interval = snapshot_interval
        self.max_running = min(max_running, num_slots - 1)
        self.tile_budget = max_prefill_tiles
        if chunked_prefill_size != -1:
            rounded = -(-chunked_prefill_size // page_size) * page_size
            self.tile_budget = max(1, min(max_prefill_tiles, rounded // TILE))
        self.num_decode_steps = num_decode_steps
        self._clock = clock
        # Ordered sets: insertion order is the order of arrival, removal anywhere is O(1).
        self._waiting: dict[Request, None] = {}
        self._prefilling: dict[Request, None] = {}
        self._running: dict[Request, None] = {}
        self._last_was_prefill = False
        # The request that could not be admitted, and the state of affairs at which that is still so.
        self._changes = 0
        self._refused: tuple[Request | None, int] = (None, 0)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> tuple[Request, ...]:
        """Requests that hold a slot and pages, in order of admission."""
        return (*self._running, *self._prefilling)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished (a plan may still have to wait for results)."""
        return bool(self._waiting or self._prefilling or self._running)

    def add(self, request: Request) -> None:
        """Queues a request, which must fit into the empty pools (see ``fits``).

        Raises:
          PoolError: it could never be admitted; nothing has been changed.
        """
        if not self.fits(request):
            raise PoolError(f"request {request.request_id} needs more pages than there are")
        self._waiting[request] = None

    def fits(self, request: Request) -> bool:
        """Whether the request can be admitted when nothing else runs. Modifies nothing."""
        return request.pages_needed(self.page_size) <= self.pages.capacity

    def next_plan(self) -> Plan | None:
        """The next step to launch, or None if every request waits for results or there is none.

        Admits requests (allocating from the pools) and advances ``scheduled`` of the plan's requests:
        the caller launches the plan, or finishes all its requests.
        """
        if self.cache is not None:
            self.cache.unlock()
        makers = (self._prefill_plan, self._decode_plan)
        for make in reversed(makers) if self._last_was_prefill else makers:
            plan = make()
            if plan is not None:
                self._last_was_prefill = isinstance(plan, PrefillPlan)
                return plan
        return None

    def confirm(self, row: PrefillRow | DecodeRow) -> None:
        """Advances ``computed`` of an unfinished request after the row's step has been read."""
        request = row.request
        end = row.end if isinstance(row, PrefillRow) else row.position + row.steps
        if not request.computed < end <= request.scheduled:
            raise PoolError(
                f"request {request.request_id} cannot confirm {end} tokens: "
                f"{request.computed} computed, {request.scheduled} scheduled"
            )
        request.computed = end
        self._changes += 1
        if self.cache is not None and isinstance(row, PrefillRow):
            self.cache.insert(request.cache_ids, request.pages, end)
            for position, slot in row.snapshots:
                del request.pending_snapshots[position]
                if not self.cache.attach(request.cache_ids, position, slot):
                    self.slots.release(slot)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request in whatever state: sets its reason, frees its pages and slot, forgets it.

        Steps that are still in flight may write to the pages; the device runs them before any step of
        the pages' next owner.

        Raises:
          PoolError: it has been finished before, or the pools contradict it.
        """
        if request.finish_reason is not None:
            raise PoolError(f"request {request.request_id} is finished already")
        request.finish_reason = reason
        self._changes += 1
        for queue in (self._waiting, self._prefilling, self._running):
            queue.pop(request, None)
        pages, slot = request.pages, request.slot
        request.pages, request.slot = [], 0
        pending, request.pending_snapshots = request.pending_snapshots, {}
        if slot:
            self.pages.release(pages)
            for held in (slot, *pending.values()):
                self.slots.release(held)

    def flush_cache(self) -> None:
        """Forgets every cached prefix; running requests are untouched."""
        if self.cache is not None:
            self.cache.flush()
            self._changes += 1

    def rebuild_pools(self) -> None:
        """Replaces pools that contradict themselves by fresh ones.

        Raises:
          PoolError: some request holds pages or a slot.
        """
        if self.admitted:
            raise PoolError("pools can only be rebuilt when nobody holds anything")
        self.pages = PagePool(self.pages.capacity + 1)
        self.slots = SlotPool(self.slots.capacity + 1)
        if self.cache is not None:
            self.cache = PrefixCache(self.pages, self.slots, self.page_size)
        self._changes += 1

    def stats(self) -> SchedulerStats:
        """A snapshot. Modifies nothing."""
        first = next(iter(self._waiting), None)
        return SchedulerStats(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling),
            running=len(self._running),
            # What only the cache holds is free to whoever needs it.
            free_pages=max(0, self.pages.capacity - sum(len(r.pages) for r in self.admitted)),
            free_slots=self.slots.capacity - len(self.admitted),
            longest_wait=0.0 if first is None else self._clock() - first.arrival,
        )

    def check_integrity(self) -> None:
        """Raises PoolError unless queues, lengths and pools agree with each other. Modifies nothing."""
        self.pages.check_integrity()
        self.slots.check_integrity()
        for request in self._waiting:
            _require(not request.slot and not request.pages, request, "holds something while waiting")
        for request in self.admitted:
            self._check_admitted(request)
        slots = [slot for r in self.admitted for slot in (r.slot, *r.pending_snapshots.values())]
        holders = collections.Counter(page for request in self.admitted for page in request.pages)
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

    def _check_admitted(self, request: Request) -> None:
        r = request
        ordered = 0 <= r.cached <= r.computed <= r.scheduled <= r.limit
        _require(ordered, r, f"has lengths {r.cached}, {r.computed}, {r.scheduled}, {r.limit}")
        _require(r.finish_reason is None, r, "is finished but admitted")
        _require(r.slot > 0, r, "runs without a slot")
        _require(len(r.pages) == r.pages_needed(self.page_size), r, f"holds {len(r.pages)} pages")
        in_prefill = r.scheduled < r.prompt_length
        _require((r in self._prefilling) == in_prefill, r, "is in the wrong queue")
        _require(r not in self._waiting, r, "waits and runs")
        _require(not in_prefill or r.scheduled % TILE == 0, r, f"was cut at {r.scheduled}")

    def _prefill_plan(self) -> PrefillPlan | None:
        tiles = self.tile_budget
        rows = []
        while tiles > 0:
            request = next(iter(self._prefilling), None) or self._admit_next()
            if request is None:
                break
            row = self._advance_prefill(request, tiles)
            rows.append(row)
            tiles -= -(-(row.end - row.start) // TILE)
        return PrefillPlan(tuple(rows)) if rows else None

    def _admit_next(self) -> Request | None:
        """Moves the first waiting request to prefill if it fits now."""
        request = next(iter(self._waiting), None)
        if request is None or len(self._prefilling) + len(self._running) >= self.max_running:
            return None
        if self._refused == (request, self._changes):
            return None
        match = self.cache.match(request.cache_ids) if self.cache is not None else Match()
        shared = list(match.pages)
        # Held first, so that making room for the rest cannot evict them.
        self.pages.share(shared)
        needed = request.pages_needed(self.page_size) - len(shared)
        # Nothing is evicted for a request that would not fit all the same.
        slot = self._allocate_slot() if needed <= self._obtainable_pages() else None
        fresh = None if slot is None else self._allocate_pages(needed)
        if slot is None or fresh is None:
            self.pages.release(shared)
            if slot is not None:
                self.slots.release(slot)
            self._refused = (request, self._changes)
            return None
        request.pages, request.slot = shared + fresh, slot
        request.cached = request.computed = request.scheduled = match.tokens
        request.restore_slot = match.slot
        request.snapshots = self._wanted_snapshots(request, match)
        del self._waiting[request]
        self._prefilling[request] = None
        return request

    def _obtainable_pages(self) -> int:
        """Free pages and those that only the cache holds."""
        cached = 0 if self.cache is None else self.cache.num_evictable_pages
        return self.pages.available + cached

    def _allocate_pages(self, count: int) -> list[int] | None:
        """Pages from the pool, or from what the cache can spare; None if that is not enough."""
        missing = count - self.pages.available
        if missing > 0 and self.cache is not None:
            self.cache.evict_pages(missing)
        return self.pages.allocate(count)

    def _allocate_slot(self) -> int | None:
        slot = self.slots.allocate()
        if slot is None and self.cache is not None and self.cache.evict_snapshot():
            slot = self.slots.allocate()
        return slot

    def _wanted_snapshots(self, request: Request, match: Match) -> list[int]:
        """Where later prompts will want to start: at the prompt's end, at a branch, sparsely between."""
        if self.cache is None:
            return []
        grid = math.lcm(self.page_size, TILE)
        end = (request.prompt_length - 1) // grid * grid
        branch = min(match.branch // grid * grid, end)
        return sorted(p for p in {end, branch, *range(0, end, self.snapshot_interval)} if p > match.tokens)

    def _take_snapshots(self, request: Request, end: int) -> tuple[tuple[int, int], ...]:
        """Slots for the snapshots wanted up to ``end``, as far as there are any."""
        taken = []
        while request.snapshots and request.snapshots[0] <= end:
            position = request.snapshots.pop(0)
            assert self.cache is not None
            if self.cache.has_snapshot(request.cache_ids, position):
                continue
            slot = self._allocate_slot()
            if slot is not None:
                request.pending_snapshots[position] = slot
                taken.append((position, slot))
        return tuple(taken)

    def _advance_prefill(self, request: Request, tiles: int) -> PrefillRow:
        start = request.scheduled
        end = min(start + tiles * TILE, request.prompt_length)
        is_last = end == request.prompt_length
        request.scheduled = end
        source, request.restore_slot = request.restore_slot or request.slot, 0
        if is_last:
            del self._prefilling[request]
            self._running[request] = None
        return PrefillRow(request, start, end, is_last, source, self._take_snapshots(request, end))

    def _decode_plan(self) -> DecodePlan | None:
        rows = []
        for request in self._running:
            steps = min(self.num_decode_steps, request.limit - request.scheduled)
            if steps > 0:
                rows.append(DecodeRow(request, request.scheduled, steps))
                request.scheduled += steps
        return DecodePlan(tuple(rows), max(row.steps for row in rows)) if rows else None


def _require(condition: bool, request: Request, problem: str) -> None:
    if not condition:
        raise PoolError(f"request {request.request_id} {problem}")
