"""Memory runs out, priorities, deadlines and long prompts: who goes first, who gives back, who overtakes."""

import gc
import time
import weakref

import pytest
from serving_fakes import (
    Driver,
    FakeRunner,
    Recorder,
    alone,
    expected_tokens,
    long_output,
    make_related,
    prompt_of,
    scheduler_of,
    serving,
)

from hybridjax.serving import SamplingParams
from hybridjax.serving.plan import DecodePlan, PrefillPlan
from hybridjax.serving.waiting import WaitingQueue


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_the_last_to_come_gives_way_and_ends_with_the_same_tokens(lag, caching):
    driver = Driver(lag, num_pages=8, num_slots=9, prefix_caching=caching)
    requests = [long_output(f"r{i}") for i in range(3)]  # 5 pages each at the end, 7 in all
    for request in requests:
        driver.scheduler.add(request)
    driver.finish(*requests)
    assert [request.epoch for request in requests][0] == 0, "the first is never preempted"
    assert driver.scheduler.stats().preempted == sum(r.epoch for r in requests) > 0
    forced = [len(row.forced) for p in driver.plans if isinstance(p, DecodePlan) for row in p.rows]
    assert sum(forced) > 0, "known tokens are fed again, not sampled"


def test_a_preempted_request_comes_back_before_those_who_came_later():
    driver = Driver(num_pages=8, max_running=3)
    requests = [long_output(f"r{i}") for i in range(4)]
    for request in requests:
        driver.scheduler.add(request)
    driver.finish(*requests)
    first_rows = [
        row.request.request_id for p in driver.plans if isinstance(p, PrefillPlan) for row in p.rows
    ]
    assert first_rows[:3] == ["r0", "r1", "r2"]
    assert first_rows.index("r3") > max(i for i, name in enumerate(first_rows) if name == "r1")


def test_replaying_is_bounded():
    """Ten requests on room for three: nobody is preempted again and again."""
    driver = Driver(num_pages=16, num_slots=12, max_running=10)
    requests = [long_output(f"r{i}") for i in range(10)]
    for request in requests:
        driver.scheduler.add(request)
    driver.finish(*requests)
    assert driver.scheduler.stats().preempted <= 20
    fed = sum(row.steps for p in driver.plans if isinstance(p, DecodePlan) for row in p.rows)
    assert fed <= 2 * sum(r.max_tokens for r in requests)


def test_equal_prompts_computed_side_by_side_do_not_pin_each_other_s_pages():
    """Each holds its own copy of pages that the cache knows in the other's."""
    driver = Driver(1, num_pages=9, prefix_caching=True, snapshot_interval=8192, chunked_prefill_size=64)
    twins = [make_related(name, 250, 250, max_tokens=260, ignore_eos=True) for name in "ab"]
    for twin in twins:
        driver.scheduler.add(twin)
    driver.finish(*twins)
    assert driver.scheduler.memory.cache.num_pages == 3


def test_a_higher_priority_preempts_and_goes_first():
    driver = Driver(num_pages=8, max_running=2, priorities=True)
    low = [long_output(f"low{i}") for i in range(3)]
    for request in low:
        request.priority = -1
        driver.scheduler.add(request)
    for _ in range(6):
        driver.step()
    urgent = long_output("urgent", tokens=20)
    driver.scheduler.add(urgent)
    plan = driver.step()
    assert isinstance(plan, PrefillPlan) and [row.request for row in plan.rows] == [urgent]
    assert [request.epoch for request in low] == [0, 1, 0]
    equal = long_output("equal", tokens=20)
    driver.scheduler.add(equal)
    for _ in range(2):  # prefill and decode steps alternate
        driver.step()
    assert equal.admitted is not None and low[0].epoch == 1
    driver.finish(*low, urgent, equal)


def test_without_the_flag_priorities_change_nothing():
    driver = Driver(max_running=1)
    first, second = long_output("first"), long_output("second")
    second.priority = 5
    for request in (first, second):
        driver.scheduler.add(request)
    for _ in range(3):
        driver.step()
    assert (first.epoch, second.admitted) == (0, None)
    driver.finish(first, second)


def test_the_longest_cached_prefix_goes_first_but_not_for_ever():
    driver = Driver(prefix_caching=True, policy="lpm", max_running=1)
    warm = make_related("warm", 300, 300, max_tokens=1)
    driver.scheduler.add(warm)
    driver.finish(warm)
    cold = make_related("cold", 300, 0, max_tokens=1)
    others = [make_related(f"o{i}", 300, 280, max_tokens=1) for i in range(100)]
    for request in (cold, *others):
        driver.scheduler.add(request)
    order = []
    while driver.scheduler.has_work:
        plan = driver.step()
        if isinstance(plan, PrefillPlan):
            order += [row.request.request_id for row in plan.rows if row.is_last]
    assert order.index("cold") == 64


def test_short_prompts_do_not_wait_for_long_ones():
    driver = Driver(num_pages=200, num_slots=20, max_running=16)
    longs = [make_related(f"long{i}", 630, 0, max_tokens=2, ignore_eos=True) for i in range(5)]
    for request in longs:
        driver.scheduler.add(request)
    driver.step()
    shorts = [make_related(f"short{i}", 100, 0, max_tokens=2, ignore_eos=True) for i in range(3)]
    for request in shorts:
        driver.scheduler.add(request)
    rows = [row for _ in range(3) if isinstance(p := driver.step(), PrefillPlan) for row in p.rows]
    done = {row.request.request_id for row in rows if row.is_last}
    assert {"short0", "short1"} <= done, "half of each step is theirs"
    assert any(row.request.request_id.startswith("long") for row in rows), "and half is not"
    driver.finish(*longs, *shorts)


def test_a_flood_of_short_prompts_does_not_starve_a_long_one():
    driver = Driver(num_pages=200, num_slots=20, max_running=16)
    long = make_related("long", 630, 0, max_tokens=2, ignore_eos=True)
    driver.scheduler.add(long)
    count = 0
    while long.finish_reason is None:
        for _ in range(6):
            driver.scheduler.add(make_related(f"s{count}", 60, 0, max_tokens=1))
            count += 1
        driver.step()
        assert count < 100
    assert long.output == expected_tokens(long, 101)


def test_a_long_prompt_leaves_no_tiles_unused():
    driver = Driver(max_running=4)
    for name in "ab":
        driver.scheduler.add(make_related(name, 330, 0, max_tokens=1))
    plan = driver.step()
    assert [(row.request.request_id, row.start, row.end) for row in plan.rows] == [
        ("a", 0, 330),
        ("b", 0, 128),
    ]


def test_deadlines_and_queue_timeouts():
    now = [0.0]
    scheduler = scheduler_of(max_running=1, queue_timeout=5.0, clock=lambda: now[0])
    running, waiting, hurried = (make_related(n, 20, 0, max_tokens=50) for n in ("r", "w", "h"))
    hurried.deadline = 2.0
    for request in (running, waiting, hurried):
        scheduler.add(request)
    scheduler.next_plan()
    assert scheduler.expired() == []
    now[0] = 2.0
    assert scheduler.expired() == [hurried]
    scheduler.finish(hurried, "timeout")
    now[0] = 10.0
    assert scheduler.expired() == [waiting], "what runs has no queue timeout"
    assert scheduler.expired() == []


def test_a_preempted_request_does_not_expire_by_the_queue_timeout():
    now = [0.0]
    scheduler = scheduler_of(queue_timeout=5.0, clock=lambda: now[0])
    request = long_output("a")
    scheduler.add(request)
    scheduler.next_plan()
    scheduler.preempt(request)
    now[0] = 6.0
    assert scheduler.expired() == []


def test_the_engine_preempts_without_anyone_noticing():
    runner = FakeRunner(num_pages=8, context_length=448)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=1)
    with serving(runner) as (engine, _):
        prompts = [prompt_of(60, i) for i in range(6)]
        results = engine.generate(prompts, params)
        assert engine.stats.preempted > 0
        for result, prompt in zip(results, prompts, strict=True):
            assert list(result.token_ids) == alone(engine, prompt, params)
            assert result.logprobs is not None
            assert [item.token_id for item in result.logprobs] == list(result.token_ids)


def test_the_engine_ends_a_request_at_its_deadline():
    runner, recorder = FakeRunner(), Recorder()
    with serving(runner, request_timeout=0.2) as (engine, _):
        runner.on_launch = lambda plan: time.sleep(0.01)
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        engine.submit(prompt_of(60), params, recorder, request_id="a", timeout=60)
        recorder.wait()
        assert recorder.reason("a") == "timeout"
        assert 0 < len(recorder.tokens("a")) < 500
        assert recorder.tokens("a") == alone(engine, prompt_of(60), params)[: len(recorder.tokens("a"))]


def test_a_request_that_does_not_fit_protects_no_cached_pages():
    """Else what decodes is preempted for pages that nobody uses, again and again."""
    driver = Driver(num_pages=11, prefix_caching=True)
    known = make_related("known", 449, 449, max_tokens=1)
    driver.scheduler.add(known)
    driver.finish(known)
    assert driver.scheduler.memory.cache.num_pages == 7
    decoding = make_related("decoding", 65, 0, max_tokens=200, ignore_eos=True)
    driver.scheduler.add(decoding)
    driver.step()
    again = make_related("again", 449, 449, max_tokens=60, ignore_eos=True)
    driver.scheduler.add(again)
    driver.finish(decoding, again)
    assert driver.scheduler.stats().preempted == 0


def test_a_long_prompt_that_others_overtake_is_passed_over_no_more_than_any_other():
    driver = Driver(prefix_caching=True, policy="lpm", max_running=3, num_pages=200)
    warm = make_related("warm", 300, 300, max_tokens=1)
    driver.scheduler.add(warm)
    driver.finish(warm)
    longs = [make_related(f"long{i}", 630, 0, max_tokens=1) for i in range(2)]
    for request in longs:
        driver.scheduler.add(request)
    for i in range(400):
        driver.scheduler.add(make_related(f"s{i}", 300, 290, max_tokens=1))
        driver.step()
    assert all(request.finish_reason for request in longs)


def test_ended_requests_are_not_kept_for_their_deadlines():
    scheduler = scheduler_of(queue_timeout=1e6, num_pages=400, num_slots=99, max_running=64)
    kept = []
    for i in range(50):
        request = make_related(f"r{i}", 20, 0, max_tokens=1)
        request.deadline = 1e9
        scheduler.add(request)
        kept.append(weakref.ref(request))
    for request in [ref() for ref in kept]:
        scheduler.finish(request, "abort")
    del request
    gc.collect()
    assert [ref for ref in kept if ref() is not None] == []


def test_nobody_is_preempted_for_pages_that_others_share():
    """Priority 1 needs more than what priority 0 holds alone: its prompt's pages are priority 2's as well."""
    driver = Driver(num_pages=11, prefix_caching=True, priorities=True, max_running=4)
    first = make_related("first", 330, 330, max_tokens=100, ignore_eos=True)
    first.priority = 2
    driver.scheduler.add(first)
    driver.step()
    driver.step()
    second = make_related("second", 330, 330, max_tokens=100, ignore_eos=True)
    driver.scheduler.add(second)
    for _ in range(2):
        driver.step()
    assert second.cached == 320 and second.slot
    large = make_related("large", 400, 0, max_tokens=20, ignore_eos=True)
    large.priority = 1
    driver.scheduler.add(large)
    driver.step()
    assert (second.epoch, large.admitted) == (0, None)
    driver.finish(first, second, large)


def test_offline_generation_keeps_the_operator_s_time_limit():
    runner = FakeRunner()
    with serving(runner, request_timeout=0.2) as (engine, _):
        runner.on_launch = lambda plan: time.sleep(0.01)
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        assert engine.generate([prompt_of(60)], params)[0].finish_reason == "timeout"


def test_nobody_is_preempted_if_others_would_have_too_little_left():
    """An admission leaves pages for those who go on: victims are not enough if that takes them all."""
    driver = Driver(num_pages=11, priorities=True, max_running=4)
    high = make_related("high", 250, 0, max_tokens=200, ignore_eos=True)
    low = make_related("low", 60, 0, max_tokens=200, ignore_eos=True)
    high.priority = 2
    for request in (high, low):
        driver.scheduler.add(request)
    for _ in range(2):
        driver.step()
    middle = make_related("middle", 380, 0, max_tokens=20, ignore_eos=True)
    middle.priority = 1
    driver.scheduler.add(middle)
    free = driver.scheduler.stats().free_pages
    driver.step()
    if middle.admitted is None:
        assert low.epoch == 0, f"{free} pages were free, and nothing was gained"
    driver.finish(high, low, middle)


def test_a_full_engine_does_not_look_for_whom_to_admit():
    driver = Driver(max_running=1, policy="lpm", prefix_caching=True)
    driver.scheduler.add(long_output("running"))
    driver.step()
    looked = []
    driver.scheduler._waiting._cached_tokens = lambda request: looked.append(request) or 0
    for i in range(5):
        driver.scheduler.add(long_output(f"r{i}"))
    for _ in range(10):
        driver.step()
    assert looked == []


def test_a_request_that_was_refused_is_tried_again_only_when_something_has_become_free():
    driver = Driver(num_pages=11, prefix_caching=True)
    driver.scheduler.add(long_output("running", 250, 200))
    driver.step()
    tried = []
    match = driver.scheduler.memory.match
    driver.scheduler.memory.match = lambda request: tried.append(request) or match(request)
    large = long_output("large", 500, 60)
    driver.scheduler.add(large)
    for _ in range(20):
        driver.step()
    assert large.admitted is None and 1 <= len(tried) <= 2
    driver.finish(large)


def test_patience_survives_the_return_of_an_older_request():
    cached = {}
    queue = WaitingQueue("lpm", priorities=False, cached_tokens=lambda request: cached.get(request, 0))
    old, cold = long_output("old"), long_output("cold")
    queue.add(old)
    queue.take(old)
    queue.add(cold)
    for i in range(1000):
        warm = long_output(f"w{i}")
        cached[warm] = 64
        queue.add(warm)
        if i % 20 == 0:  # an older one comes back from time to time
            cached[old] = 128
            queue.add(old)
            queue.take(old)
        chosen = queue.first()
        assert chosen is not None
        queue.take(chosen)
        if chosen is cold:
            break
        queue.forget(chosen)
    assert 60 <= i <= 70


def test_prompts_are_looked_up_for_the_first_time_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr("hybridjax.serving.waiting._NEW_TOKENS", 32 * 64)
    asked = []
    queue = WaitingQueue("lpm", priorities=False, cached_tokens=lambda request: asked.append(request) or 0)
    waiting = [long_output(f"w{i}", 64, 8) for i in range(100)]
    for request in waiting:
        queue.add(request)
    new = []
    for _ in range(4):
        asked.clear()
        assert queue.first() is waiting[0]
        new.append(len(set(asked)) - sum(new))
    assert new == [32, 32, 32, 4]  # of 64 tokens each
    asked.clear()
    queue.take(waiting[0])
    queue.first()
    assert asked == waiting[1:]
