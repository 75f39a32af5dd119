"""From queues and pools to the next plan. Plain Python without a device, driven by one thread.

A request is admitted when a slot and the pages for its prompt (and for what is known of its completion)
are free; decode steps take further pages as they need them. When there are none left, the least important
request, the last that came, is *preempted*: it gives everything back and waits at its old place. The most
important one can always go on, so everything ends.

Prefill and decode steps alternate while there is work for both, with prefill bounded in time (pacing.py).
A prompt that takes more than half a prefill step does not hold up shorter ones: they share the step, and
of long prompts one is computed at a time. Nobody overtakes a request that does not fit yet.

With a prefix cache, an admitted request starts behind the longest prefix whose state is known, and
leaves its own prompt's pages and some snapshots of its state to later ones; pages and snapshots that
nobody uses are evicted when a request needs their place.

Lengths advance twice, because a step is launched before the previous one has been read:
``next_plan`` advances ``scheduled``, ``confirm`` advances ``computed``.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from hybridjax.batch import TILE
from hybridjax.serving.api import FinishReason
from hybridjax.serving.deadlines import Deadlines
from hybridjax.serving.integrity import check_integrity
from hybridjax.serving.memory import StateMemory
from hybridjax.serving.pacing import Pace
from hybridjax.serving.plan import DecodePlan, DecodeRow, Plan, PrefillPlan, PrefillRow
from hybridjax.serving.pools import PoolError
from hybridjax.serving.request import Request
from hybridjax.serving.waiting import WaitingQueue

# Pages per decoding request that an admission leaves free, also after a preemption until a request ends:
# without them the newcomer would soon be preempted.
_SPARE, _SPARE_UNDER_PRESSURE = 1, 4
_MASK_PATIENCE = 0.005  # seconds; a mask takes a tenth of that
# Waiting requests among which one is looked for that may overtake a long prompt.
_OVERTAKERS = 64


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of queues and pools; ``longest_wait`` is the first waiting request's, in seconds."""

    waiting: int
    prefilling: int
    running: int
    free_pages: int
    free_slots: int
    longest_wait: float
    preempted: int = 0


class Scheduler:
    """Owns the queues, the pools and every accepted request's lengths, pages and slot.

    Args:
      num_pages, num_slots: sizes of the pools, page 0 and slot 0 included.
      page_size: tokens per page.
      max_running: requests that are admitted at a time.
      max_prefill_tiles: 64-row tiles of the largest prefill step.
      chunked_prefill_size: tokens of a prefill step, rounded to pages and tiles; -1: as many as fit.
      prefill_sizes: tiles of the compiled prefill shapes, ascending; default: only the largest.
      prefill_share: of the device's time while requests decode, in (0, 1]; see pacing.Pace.
      num_decode_steps: most steps per decode dispatch.
      prefix_caching: keep the state of finished prompts for later ones.
      snapshot_interval: tokens between the snapshots along a long prompt, a multiple of pages and tiles.
      policy, priorities: see WaitingQueue. With priorities, a request also preempts less important ones
        to be admitted.
      queue_timeout: seconds after which a request that was never admitted expires; None: never.
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
        prefill_sizes: Sequence[int] = (),
        prefill_share: float = 1.0,
        num_decode_steps: int = 1,
        prefix_caching: bool = False,
        snapshot_interval: int = 8192,
        policy: str = "fcfs",
        priorities: bool = False,
        queue_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.memory = StateMemory(num_pages, num_slots, page_size, prefix_caching=prefix_caching)
        self.page_size = page_size
        self.snapshot_interval = snapshot_interval
        self.max_running = min(max_running, num_slots - 1)
        self.tile_budget = max_prefill_tiles
        if chunked_prefill_size != -1:
            rounded = -(-chunked_prefill_size // page_size) * page_size
            self.tile_budget = max(1, min(max_prefill_tiles, rounded // TILE))
        self.num_decode_steps = num_decode_steps
        self.pace = Pace(prefill_share, prefill_sizes or (self.tile_budget,))
        self._priorities = priorities
        self._queue_timeout = queue_timeout
        self._clock = clock
        self._waiting = WaitingQueue(
            policy, priorities=priorities, cached_tokens=lambda request: self.memory.cached_tokens(request)
        )
        # Ordered sets: insertion order is the order of admission, removal anywhere is O(1).
        self._prefilling: dict[Request, None] = {}
        self._running: dict[Request, None] = {}
        self._last_was_prefill = False
        # The state of affairs, and the one at which the next request could not be admitted.
        self._changes = 0
        self._refused_at = -1
        self._under_pressure = False
        self._preempted = 0
        self._deadlines = Deadlines()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> tuple[Request, ...]:
        """Requests that hold a slot and pages, in order of admission."""
        return (*self._running, *self._prefilling)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Every request: those that are admitted, then those that wait."""
        return (*self.admitted, *self._waiting)

    @property
    def holding(self) -> tuple[Request, ...]:
        """Requests that hold anything; more than the admitted ones only if planning has failed in between."""
        return (*self.admitted, *(r for r in self._waiting if r.slot or r.pages or r.pending_snapshots))

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
        self._waiting.add(request)
        self._changes += 1
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request)
        if self._queue_timeout is not None:
            self._deadlines.add(request.arrival + self._queue_timeout, request, only_waiting=True)

    def fits(self, request: Request) -> bool:
        """Whether the request can finish when nothing else runs. Modifies nothing."""
        return request.pages_needed(self.page_size) <= self.memory.pages.capacity

    def expired(self) -> list[Request]:
        """Unfinished requests past their deadline or waiting for too long; each is told once."""
        return self._deadlines.expired(self._clock())

    def next_plan(self) -> Plan | None:
        """The next step to launch, or None if every request waits for results or there is none.

        Admits and preempts requests and advances ``scheduled`` of the plan's requests: the caller launches
        the plan, or finishes all its requests.
        """
        plan = self._try_plan()
        if plan is None and self.has_work and not self._in_flight:
            # Those who gave way to somebody who did not fit after all, or met what was protected, fit now.
            self._refused_at = -1
            plan = self._try_plan()
        return plan

    def _try_plan(self) -> Plan | None:
        if self.memory.cache is not None and self.memory.cache.unlock():
            self._changes += 1
        makers = [self._prefill_plan, self._decode_plan]
        if self._last_was_prefill or self.pace.owes:
            makers.reverse()
        for make in makers:
            plan = make()
            if plan is not None:
                self._last_was_prefill = isinstance(plan, PrefillPlan)
                return plan
        return None

    def is_current(self, row: PrefillRow | DecodeRow) -> bool:
        """Whether a row's request still holds what the row wrote to."""
        return row.request.finish_reason is None and row.epoch == row.request.epoch

    def confirm(self, row: PrefillRow | DecodeRow) -> None:
        """Advances ``computed`` of a current row's request after the row's step has been read."""
        request = row.request
        end = row.end if isinstance(row, PrefillRow) else row.position + row.steps
        if not request.computed < end <= request.scheduled:
            raise PoolError(
                f"request {request.request_id} cannot confirm {end} tokens: "
                f"{request.computed} computed, {request.scheduled} scheduled"
            )
        request.computed = end
        # A decode step makes no room for anybody; pages and snapshots of a prompt may be matched.
        self._changes += isinstance(row, PrefillRow)
        cache = self.memory.cache
        if cache is not None and isinstance(row, PrefillRow):
            cache.insert(request.cache_ids, request.pages, end, request.cache_salt)
            for position, slot in row.snapshots:
                del request.pending_snapshots[position]
                if not cache.attach(request.cache_ids, position, slot, request.cache_salt):
                    self.memory.slots.release(slot)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request in whatever state: sets its reason, frees its pages and slot, forgets it.

        Raises:
          PoolError: it has been finished before, or the pools contradict it.
        """
        if request.finish_reason is not None:
            raise PoolError(f"request {request.request_id} is finished already")
        request.finish_reason = reason
        self._changes += 1
        self._under_pressure = self._under_pressure and not request.slot
        self._deadlines.forget(request)
        self._waiting.forget(request)
        self._prefilling.pop(request, None)
        self._running.pop(request, None)
        self.memory.release(request)

    def preempt(self, request: Request) -> None:
        """Takes back all that an admitted request holds; it waits at its old place (see Request)."""
        del (self._prefilling if request in self._prefilling else self._running)[request]
        request.epoch += 1
        request.computed = request.scheduled = request.cached = request.restore_slot = 0
        request.snapshots, request.features = [], None
        self._preempted += 1
        self._changes += 1
        self._waiting.add(request)
        self.memory.release(request)

    def flush_cache(self) -> None:
        """Forgets every cached prefix; running requests are untouched."""
        self.memory.flush()
        self._changes += 1

    def rebuild_pools(self) -> None:
        """Replaces pools that contradict themselves by fresh ones.

        Raises:
          PoolError: some request holds pages or a slot.
        """
        if self.holding:
            raise PoolError("pools can only be rebuilt when nobody holds anything")
        self.memory = self.memory.rebuilt()
        self._changes += 1

    def stats(self) -> SchedulerStats:
        """A snapshot. Modifies nothing."""
        first = next(iter(self._waiting), None)
        pages, slots = self.memory.pages, self.memory.slots
        return SchedulerStats(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling),
            running=len(self._running),
            # What only the cache holds is free to whoever needs it.
            free_pages=pages.available + pages.num_idle,
            free_slots=slots.capacity - len(self._running) - len(self._prefilling),
            longest_wait=0.0 if first is None else self._clock() - first.arrival,
            preempted=self._preempted,
        )

    def check_integrity(self) -> None:
        """Raises PoolError unless queues, lengths and pools agree with each other. Modifies nothing."""
        check_integrity(self._waiting, self._prefilling, self._running, self.memory)

    def _prefill_plan(self) -> PrefillPlan | None:
        """Short prompts get half the step if there is a long one, and the first long one the rest."""
        if not (self._prefilling or self._waiting):
            return None
        delayed = self._delayed()
        budget = self.pace.tiles(self.tile_budget, delayed)
        half = budget // 2
        rows: list[PrefillRow] = []
        longs: list[Request] = []
        known = collections.deque(self._prefilling)
        left, limit = budget, budget
        while limit > 0:
            request = known.popleft() if known else self._admit_next(half if longs else None)
            if request is None:
                break
            if request not in self._prefilling:  # preempted for one that was admitted just now
                continue
            if self._tiles_left(request) > half:
                limit = limit if longs else min(limit, half - (budget - left))
                longs.append(request)
                continue
            rows.append(self._advance_prefill(request, limit))
            limit, left = limit - rows[-1].tiles, left - rows[-1].tiles
        longs.reverse()
        while left > 0:
            request = longs.pop() if longs else self._admit_next(None)
            if request is None:
                break
            if request in self._prefilling:
                rows.append(self._advance_prefill(request, left))
                left -= rows[-1].tiles
        rows = [row for row in rows if self.is_current(row)]
        if not rows:
            return None
        self.pace.launched(budget - left, delayed)
        return PrefillPlan(tuple(rows))

    def _delayed(self) -> float:
        """Requests that decode over those whose prompts could be computed now, at most 1."""
        decoding = sum(request.scheduled < request.limit for request in self._running)
        if not decoding:
            return 0.0
        prompts, pages = len(self._prefilling), self.memory.pages
        room = min(self.max_running - len(self._running) - prompts, _OVERTAKERS)
        left = pages.available + pages.num_idle - self._spare(self.admitted)
        for request in itertools.islice(self._waiting, room):
            left -= self.memory.pages_for(request.known_length)
            if left < 0:
                break
            prompts += 1
        return min(1.0, decoding / max(1, prompts))

    def _tiles_left(self, request: Request) -> int:
        return -(-(request.prompt_length - request.scheduled) // TILE)

    def _admit_next(self, most_tiles: int | None) -> Request | None:
        """Moves the next waiting request to prefill if it fits now.

        Args:
          most_tiles: if there is a long prompt already, a longer one than this lets others overtake.
        """
        if not self._waiting or self._refused_at == self._changes:
            return None
        if self._is_full and not self._priorities:
            return None
        request = self._waiting.first()
        if request is not None and most_tiles is not None and self._is_long(request, most_tiles):
            earliest = itertools.islice(self._waiting, _OVERTAKERS)
            short = (r for r in earliest if r.prompt_length <= most_tiles * TILE)
            request = next(short, None)
        if request is None:
            return None
        if not self._admit(request) and not self._make_room(request):
            self._refused_at = self._changes
            return None
        self._waiting.take(request)
        self._prefilling[request] = None
        return request

    def _is_long(self, request: Request, most_tiles: int) -> bool:
        return request.prompt_length - self.memory.cached_tokens(request) > most_tiles * TILE

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and pages, and its lengths; False if there is no room."""
        if self._is_full:
            return False
        match = self.memory.match(request)
        if not self.memory.admit(request, match, request.known_length, self._spare(self.admitted)):
            return False
        request.cached = request.computed = request.scheduled = match.tokens
        request.restore_slot = match.slot
        request.snapshots = self.memory.wanted_snapshots(request, match, self.snapshot_interval)
        if request.admitted is None:
            request.admitted, request.cached_tokens = self._clock(), match.tokens
        return True

    @property
    def _in_flight(self) -> bool:
        """Whether a step is under way whose result is still wanted."""
        return any(request.scheduled != request.computed for request in self.admitted)

    @property
    def _is_full(self) -> bool:
        return len(self._prefilling) + len(self._running) >= self.max_running

    def _spare(self, requests: Iterable[Request]) -> int:
        """Pages to leave over, so that these admitted requests can go on for a while."""
        each = _SPARE_UNDER_PRESSURE if self._under_pressure else _SPARE
        return sum(min(each, r.pages_needed(self.page_size) - len(r.pages)) for r in requests)

    def _make_room(self, request: Request) -> bool:
        """Preempts requests of lower priority for one that does not fit, if that helps."""
        if not self._priorities:
            return False
        victims = sorted(
            (r for r in self.admitted if r.priority < request.priority), key=self._importance, reverse=True
        )
        pages = self.memory.pages
        held = collections.Counter(page for victim in victims for page in victim.pages)
        # A page that somebody else holds too does not become free.
        freed = sum(pages.others(page) == count for page, count in held.items())
        needed = self.memory.pages_for(request.known_length)
        needed += self._spare(r for r in self.admitted if r.priority >= request.priority)
        if not victims or pages.available + pages.num_idle + freed < needed:
            return False
        for victim in victims:
            self.preempt(victim)
            if self._admit(request):
                return True
        return False

    def _importance(self, request: Request) -> tuple[int, int]:
        """Smaller is more important."""
        return -request.priority if self._priorities else 0, self._waiting.number(request)

    def _advance_prefill(self, request: Request, tiles: int) -> PrefillRow:
        start = request.scheduled
        end = min(start + tiles * TILE, request.prompt_length)
        is_last = end == request.prompt_length
        request.scheduled = end
        source, request.restore_slot = request.restore_slot or request.slot, 0
        if is_last:
            del self._prefilling[request]
            self._running[request] = None
        return PrefillRow(
            request,
            start,
            end,
            is_last,
            source,
            self.memory.take_snapshots(request, end),
            request.known_tokens(end - 1, 1) if is_last else (),
            request.epoch,
        )

    def _decode_plan(self) -> DecodePlan | None:
        late = self._late_masks()
        rows = self._decode_rows([request for request in self._running if request not in late])
        # Launching waits for masks: better a request misses a step than that others wait with it.
        if late and not rows and not self._in_flight:
            rows = self._decode_rows(late)
        if not rows:
            return None
        self.pace.launched(0)
        return DecodePlan(tuple(rows.values()), max(row.steps for row in rows.values()))

    def _decode_rows(self, requests: Sequence[Request]) -> dict[Request, DecodeRow]:
        """The steps that these requests can take now; takes pages, preempts, advances ``scheduled``."""
        rows: dict[Request, DecodeRow] = {}
        for request in requests:
            if request not in self._running:  # preempted for one before it
                continue
            forced = request.known_tokens(request.scheduled, self.num_decode_steps)
            steps = min(self._free_steps(request, forced), request.limit - request.scheduled)
            if steps > 0 and self._make_pages(request, request.scheduled + steps, rows):
                rows[request] = DecodeRow(request, request.scheduled, steps, forced[:steps], request.epoch)
                request.scheduled += steps
        return rows

    def _late_masks(self) -> list[Request]:
        """Requests that could decode if their next masks had been computed; each mask gets a moment once."""
        until, late = None, []
        for request in self._running:
            matcher = request.matcher
            if matcher is None or request.scheduled != request.computed or matcher.ready:
                continue
            if request.known_tokens(request.scheduled, 1):  # replayed without a mask
                continue
            until = until or time.monotonic() + _MASK_PATIENCE
            patience = 0.0 if request.waited_for == len(request.output) else until - time.monotonic()
            request.waited_for = len(request.output)
            if not matcher.wait(patience):
                late.append(request)
        return late

    def _free_steps(self, request: Request, forced: tuple[int, ...]) -> int:
        """Steps that need no result first: what may follow a grammar's token depends on the token."""
        if request.matcher is None:
            return self.num_decode_steps
        if forced:
            return len(forced)
        return int(request.scheduled == request.computed)

    def _make_pages(self, request: Request, tokens: int, rows: dict[Request, DecodeRow]) -> bool:
        """Gives a running request its pages, others' if need be; False if it has been preempted itself."""
        while not self.memory.grow(request, tokens):
            victim = max(self.admitted, key=self._importance)
            self.preempt(victim)
            self._under_pressure = True
            rows.pop(victim, None)
            if victim is request:
                return False
        return True
