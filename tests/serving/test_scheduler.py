import collections

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from serving_fakes import LIMITS, FakeRunner, expected_tokens, make_related, scheduler_of

from hybridjax.serving.api import SamplingParams
from hybridjax.serving.plan import DecodePlan, DecodeRow, PrefillPlan, PrefillRow
from hybridjax.serving.pools import PoolError
from hybridjax.serving.request import Request, make_request

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 192, 300]


def make(name: str, length: int, **params) -> Request:
    # Not Python's hash of a str, which differs between processes.
    prompt = np.random.default_rng(sum(map(ord, name)) + length).integers(0, 101, length)
    return make_request(name, prompt, SamplingParams(**params), LIMITS, seed=11)


def chunks(plan) -> list[tuple[str, int, int, bool]]:
    assert isinstance(plan, PrefillPlan)
    return [(row.request.request_id, row.start, row.end, row.is_last) for row in plan.rows]


def decodes(plan) -> list[tuple[str, int, int]]:
    assert isinstance(plan, DecodePlan)
    return [(row.request.request_id, row.position, row.steps) for row in plan.rows]


class MoodyMatcher:
    """Its mask is late, again and again."""

    def __init__(self, seed: int):
        self._draw = np.random.default_rng(seed)

    @property
    def ready(self) -> bool:
        return self._draw.random() < 0.6

    def wait(self, seconds: float) -> bool:
        return self._draw.random() < 0.3


class Serving(RuleBasedStateMachine):
    """Random arrivals, aborts, launches and reads against the model's own sequential answer.

    Prompts share prefixes of every length around page and tile borders, pools are so small that the
    cache must evict, and it may be flushed at any time.
    """

    @initialize(
        page_size=st.sampled_from([16, 64, 128]),
        chunk=st.sampled_from([-1, 1, 64, 100, 128, 256]),
        steps=st.integers(1, 5),
        slots=st.integers(2, 6),
        tokens=st.sampled_from([640, 1280, 2560]),
        tiles=st.integers(1, 8),
        caching=st.booleans(),
        interval=st.sampled_from([128, 256, 8192]),
        policy=st.sampled_from(["fcfs", "lpm"]),
        priorities=st.booleans(),
        share=st.sampled_from([0.2, 0.5, 1.0]),
    )
    def start(self, page_size, chunk, steps, slots, tokens, tiles, caching, interval, **policy):
        self.runner = FakeRunner(
            num_pages=tokens // page_size + 1,
            num_slots=slots,
            page_size=page_size,
            max_prefill_tiles=tiles,
        )
        self.scheduler = scheduler_of(
            num_pages=self.runner.num_pages,
            num_slots=slots,
            page_size=page_size,
            max_prefill_tiles=tiles,
            chunked_prefill_size=chunk,
            num_decode_steps=steps,
            max_running=max(1, slots - 2),
            prefix_caching=caching,
            snapshot_interval=interval,
            policy=policy["policy"],
            priorities=policy["priorities"],
            prefill_share=policy["share"],
            prefill_sizes=sorted({1, -(-tiles // 2), tiles}),
        )
        self.in_flight = collections.deque()
        self.requests: list[Request] = []
        self.tokens: dict[Request, list[int]] = {}

    @rule(
        length=st.sampled_from(LENGTHS),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        temperature=st.sampled_from([0.0, 1.0]),
        min_tokens=st.sampled_from([0, 0, 3]),
        seed=st.integers(0, 3),
        fork=st.sampled_from([0, 63, 64, 65, 128, 191, 192, 300]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([b"", b"", b"a"]),
        grammar=st.booleans(),
    )
    def arrive(self, length, fork, priority, salt, grammar, **params):
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        request = make_related(f"r{len(self.requests)}", length, fork, **params)
        request.priority, request.cache_salt = priority, salt
        request.matcher = MoodyMatcher(request.prompt_length) if grammar else None
        self.requests.append(request)
        self.tokens[request] = []
        self.scheduler.add(request)

    @precondition(lambda self: len(self.in_flight) < 3)
    @rule()
    def launch(self):
        plan = self.scheduler.next_plan()
        if plan is not None:
            for row in plan.rows:
                ready = row.request.matcher is None or not isinstance(row, DecodeRow)
                ready = ready or row.position == row.request.computed or len(row.forced) == row.steps
                assert ready, "a grammar's next token was scheduled before its last one was known"
                assert (
                    row.request.matcher is None
                    or not isinstance(row, DecodeRow)
                    or (row.steps == max(1, len(row.forced)))
                )
            self.in_flight.append((plan, self.runner.launch(plan)))
        else:
            assert self.in_flight or not self.scheduler.has_work

    @precondition(lambda self: self.in_flight)
    @rule(seconds=st.floats(0, 10))
    def read(self, seconds=1.0):
        plan, handle = self.in_flight.popleft()
        result = self.runner.read(handle)
        self.scheduler.pace.took(seconds)
        for column, row in enumerate(plan.rows):
            request = row.request
            if not self.scheduler.is_current(row):
                continue
            self.scheduler.confirm(row)
            for token in result.tokens[len(row.forced) :, column].tolist():
                if token >= 0 and request.finish_reason is None:
                    self.accept(request, token)

    def accept(self, request: Request, token: int) -> None:
        tokens = self.tokens[request]
        tokens.append(token)
        request.output.append(token)
        if len(tokens) > request.params.min_tokens and token in request.stop_tokens:
            self.scheduler.finish(request, "stop")
        elif len(tokens) == request.max_tokens:
            assert request.computed == request.limit
            self.scheduler.finish(request, "length")
        else:
            assert len(tokens) <= request.computed - request.prompt_length + 1

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data):
        unfinished = [request for request in self.requests if request.finish_reason is None]
        self.scheduler.finish(data.draw(st.sampled_from(unfinished)), "abort")

    @precondition(lambda self: self.scheduler.admitted)
    @rule(data=st.data())
    def preempt(self, data):
        self.scheduler.preempt(data.draw(st.sampled_from(self.scheduler.admitted)))

    @rule()
    def flush(self):
        self.scheduler.flush_cache()

    @invariant()
    def integrity(self):
        self.scheduler.check_integrity()
        assert self.runner.violations == []

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_work or self.in_flight:
            self.launch()
            if self.in_flight:
                self.read()
            self.integrity()
        self.scheduler.flush_cache()
        assert self.scheduler.memory.pages.available == self.scheduler.memory.pages.capacity
        assert self.scheduler.memory.slots.available == self.scheduler.memory.slots.capacity
        for request in self.requests:
            expected = expected_tokens(request, self.runner.vocab_size)
            if request.finish_reason == "abort":
                assert self.tokens[request] == expected[: len(self.tokens[request])]
            else:
                assert self.tokens[request] == expected


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_chunks_end_on_the_grid_or_with_the_prompt(length):
    scheduler = scheduler_of(chunked_prefill_size=64)
    scheduler.add(make("a", length, max_tokens=1))
    found = []
    while (plan := scheduler.next_plan()) is not None:
        found += chunks(plan)
    borders = [*range(0, length, 64), length]
    assert found == [("a", s, e, e == length) for s, e in zip(borders, borders[1:])]


def test_several_requests_share_a_step_in_whole_tiles():
    scheduler = scheduler_of(chunked_prefill_size=256)
    for name, length in (("a", 65), ("b", 1), ("c", 130), ("d", 5)):
        scheduler.add(make(name, length, max_tokens=1))
    assert chunks(scheduler.next_plan()) == [("a", 0, 65, True), ("b", 0, 1, True), ("c", 0, 64, False)]
    assert chunks(scheduler.next_plan()) == [("c", 64, 130, True), ("d", 0, 5, True)]
    assert scheduler.next_plan() is None


@pytest.mark.parametrize(
    ("chunk", "page_size", "tiles"),
    [(-1, 64, 8), (1, 64, 1), (64, 64, 1), (65, 64, 2), (65, 256, 4), (4096, 64, 8), (10, 16, 1)],
)
def test_prefill_budget(chunk, page_size, tiles):
    scheduler = scheduler_of(chunked_prefill_size=chunk, page_size=page_size, num_pages=200)
    assert scheduler.tile_budget == tiles


def test_prefill_and_decode_alternate():
    scheduler = scheduler_of(chunked_prefill_size=64, num_decode_steps=2)
    scheduler.add(make("a", 10, max_tokens=100))
    scheduler.add(make("b", 200, max_tokens=100))
    kinds = [type(scheduler.next_plan()).__name__ for _ in range(9)]
    assert kinds == ["PrefillPlan", "DecodePlan"] * 4 + ["PrefillPlan"]
    assert [type(scheduler.next_plan()).__name__ for _ in range(3)] == ["DecodePlan"] * 3


def test_a_request_decodes_before_its_first_token_was_read():
    scheduler = scheduler_of(num_decode_steps=4)
    request = make("a", 64, max_tokens=8)
    scheduler.add(request)
    assert chunks(scheduler.next_plan()) == [("a", 0, 64, True)]
    assert decodes(scheduler.next_plan()) == [("a", 64, 4)]
    assert decodes(scheduler.next_plan()) == [("a", 68, 3)]
    assert scheduler.next_plan() is None, "everything is launched; results are awaited"
    assert scheduler.has_work
    assert (request.computed, request.scheduled, request.limit) == (0, 71, 71)


def test_rows_stop_at_their_own_limit():
    scheduler = scheduler_of(num_decode_steps=4)
    for name, max_tokens in (("a", 1), ("b", 2), ("c", 9)):
        scheduler.add(make(name, 3, max_tokens=max_tokens))
    scheduler.next_plan()
    plan = scheduler.next_plan()
    assert decodes(plan) == [("b", 3, 1), ("c", 3, 4)]
    assert plan is not None and plan.num_steps == 4
    assert decodes(scheduler.next_plan()) == [("c", 7, 4)]
    last = scheduler_of(num_decode_steps=4)
    last.add(make("d", 3, max_tokens=3))
    last.next_plan()
    plan = last.next_plan()
    assert plan is not None and plan.num_steps == 2, "no more steps than some row can use"


def test_nobody_overtakes_a_request_that_does_not_fit():
    scheduler = scheduler_of(num_pages=11, num_slots=9)
    big, small = make("big", 500, max_tokens=140), make("small", 10, max_tokens=10)
    first = make("first", 200, max_tokens=10)
    for request in (first, big, small):
        scheduler.add(request)
    assert chunks(scheduler.next_plan()) == [("first", 0, 200, True)]
    assert scheduler.num_waiting == 2, "small would fit, but big is before it"
    scheduler.finish(first, "abort")
    assert [name for name, *_ in chunks(scheduler.next_plan())] == ["small", "big"]


def test_admission_is_bounded_by_max_running_and_slots():
    for changes in ({"max_running": 2}, {"num_slots": 3}):
        scheduler = scheduler_of(**changes)
        requests = [make(f"r{i}", 5, max_tokens=5) for i in range(3)]
        for request in requests:
            scheduler.add(request)
        assert len(chunks(scheduler.next_plan())) == 2
        assert scheduler.num_waiting == 1
        scheduler.finish(requests[0], "stop")
        assert decodes(scheduler.next_plan()) == [("r1", 5, 4)]
        assert chunks(scheduler.next_plan()) == [("r2", 0, 5, True)]


def test_an_admission_without_a_slot_takes_no_pages():
    scheduler = scheduler_of(num_slots=3)
    while scheduler.memory.slots.allocate() is not None:
        pass
    scheduler.add(make("a", 5, max_tokens=5))
    assert scheduler.next_plan() is None
    assert scheduler.memory.pages.available == scheduler.memory.pages.capacity
    assert scheduler.num_waiting == 1


def test_pages_are_taken_as_they_are_needed():
    scheduler = scheduler_of(chunked_prefill_size=64)
    request = make("a", 130, max_tokens=200)
    scheduler.add(request)
    assert request.pages == []
    scheduler.next_plan()
    assert len(request.pages) == 3, "for the whole prompt"
    assert request.slot > 0
    while request.scheduled < request.limit:
        assert scheduler.next_plan() is not None
        assert len(request.pages) == max(3, -(-request.scheduled // 64))
    scheduler.finish(request, "abort")
    assert (request.pages, request.slot, request.finish_reason) == ([], 0, "abort")
    assert scheduler.memory.pages.available == scheduler.memory.pages.capacity
    assert not scheduler.has_work


def test_what_can_never_fit_is_refused():
    scheduler = scheduler_of(num_pages=3)
    request = make("a", 100, max_tokens=29)
    assert not scheduler.fits(request)
    with pytest.raises(PoolError):
        scheduler.add(request)
    assert not scheduler.has_work
    assert scheduler.fits(make("b", 100, max_tokens=28))


def test_confirm_and_finish_refuse_nonsense():
    scheduler = scheduler_of()
    request = make("a", 70, max_tokens=9)
    scheduler.add(request)
    with pytest.raises(PoolError):
        scheduler.confirm(PrefillRow(request, 0, 64, False))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.confirm(plan.rows[0])
    assert request.computed == 70
    with pytest.raises(PoolError):
        scheduler.confirm(plan.rows[0])
    with pytest.raises(PoolError):
        scheduler.confirm(DecodeRow(request, 70, 1))
    scheduler.finish(request, "stop")
    with pytest.raises(PoolError):
        scheduler.finish(request, "stop")


def test_stats_and_the_clock():
    now = [100.0]
    scheduler = scheduler_of(max_running=1, clock=lambda: now[0])
    for name, arrival in (("a", 90.0), ("b", 95.0), ("c", 99.0)):
        request = make(name, 200, max_tokens=5)
        request.arrival = arrival
        scheduler.add(request)
    assert scheduler.stats().longest_wait == 10
    scheduler.next_plan()
    now[0] = 101.5
    stats = scheduler.stats()
    assert (stats.waiting, stats.prefilling, stats.running) == (2, 0, 1)
    assert (stats.free_pages, stats.free_slots) == (35, 7)
    assert stats.longest_wait == 6.5


def forget_page(scheduler, request):
    request.pages.pop()


def swap_page(scheduler, request):
    request.pages[0] = scheduler.memory.pages._free[0]


def steal_page(scheduler, request):
    other = next(r for r in scheduler.admitted if r is not request)
    request.pages[0] = other.pages[0]


def extra_reference(scheduler, request):
    scheduler.memory.pages.share(request.pages[:1])


def free_held_page(scheduler, request):
    scheduler.memory.pages.release(request.pages[:1])


def free_held_slot(scheduler, request):
    scheduler.memory.slots.release(request.slot)


def leak_slot(scheduler, request):
    scheduler.memory.slots.allocate()


def leak_page(scheduler, request):
    scheduler.memory.pages.allocate(1)


def share_slot(scheduler, request):
    other = next(r for r in scheduler.admitted if r is not request)
    request.slot = other.slot


def lose_slot(scheduler, request):
    request.slot = 0


def computed_ahead(scheduler, request):
    request.computed = request.scheduled + 1


def beyond_limit(scheduler, request):
    request.scheduled = request.limit + 1


def back_to_prefill(scheduler, request):
    request.scheduled = request.computed = 0


def finished_inside(scheduler, request):
    request.finish_reason = "stop"


def waits_too(scheduler, request):
    scheduler._waiting.add(request)


def lose_request(scheduler, request):
    del scheduler._running[request]


@pytest.mark.parametrize(
    "corrupt",
    [
        forget_page,
        swap_page,
        steal_page,
        extra_reference,
        free_held_page,
        free_held_slot,
        leak_slot,
        leak_page,
        share_slot,
        lose_slot,
        computed_ahead,
        beyond_limit,
        back_to_prefill,
        finished_inside,
        waits_too,
        lose_request,
    ],
)
def test_planted_corruption_is_caught(corrupt):
    scheduler = scheduler_of()
    requests = [make("a", 70, max_tokens=5), make("b", 10, max_tokens=5), make("c", 10, max_tokens=5)]
    for request in requests[:2]:
        scheduler.add(request)
    scheduler.next_plan()
    scheduler.check_integrity()
    corrupt(scheduler, requests[0])
    with pytest.raises(PoolError):
        scheduler.check_integrity()


def test_pools_are_rebuilt_only_when_nobody_holds_anything():
    scheduler = scheduler_of()
    request = make("a", 70, max_tokens=5)
    scheduler.add(request)
    scheduler.next_plan()
    with pytest.raises(PoolError):
        scheduler.rebuild_pools()
    scheduler.finish(request, "abort")
    scheduler.memory.pages.allocate(3)
    with pytest.raises(PoolError):
        scheduler.check_integrity()
    scheduler.rebuild_pools()
    scheduler.check_integrity()
    assert scheduler.memory.pages.available == 39
