"""What the scheduler makes of the prefix cache: where prompts resume, what they leave, what makes room."""

from serving_fakes import FakeRunner, make_related, scheduler_of

from hybridjax.serving.plan import PrefillPlan


def drain(scheduler, runner):
    """Runs everything to the end; returns the prefill rows in order."""
    rows = []
    while (plan := scheduler.next_plan()) is not None:
        runner.read(runner.launch(plan))
        for row in plan.rows:
            scheduler.confirm(row)
            if row.request.computed == row.request.limit:
                scheduler.finish(row.request, "length")
        rows += plan.rows if isinstance(plan, PrefillPlan) else ()
    assert runner.violations == []
    return [(row.request.request_id, row.start, row.end) for row in rows]


def test_a_repeated_prompt_is_computed_from_its_last_grid_point():
    scheduler, runner = scheduler_of(prefix_caching=True), FakeRunner()
    for name in "ab":
        scheduler.add(make_related(name, 300, 300, max_tokens=1))
    first = scheduler.next_plan()
    assert isinstance(first, PrefillPlan)
    assert [row.request.request_id for row in first.rows] == ["a", "b"], "b came before a was known"
    runner.read(runner.launch(first))
    for row in first.rows:
        scheduler.confirm(row)
        if row.is_last:
            scheduler.finish(row.request, "length")
    drain(scheduler, runner)
    scheduler.add(make_related("c", 300, 300, max_tokens=1))
    assert drain(scheduler, runner) == [("c", 256, 300)]


def test_a_branch_costs_the_second_prompt_and_helps_the_third():
    scheduler, runner = scheduler_of(prefix_caching=True), FakeRunner()
    computed = []
    for name in "abc":
        scheduler.add(make_related(name, 300, 140, max_tokens=1))
        computed += drain(scheduler, runner)
    assert computed == [("a", 0, 300), ("b", 0, 300), ("c", 128, 300)]


def test_between_snapshots_a_branch_resumes_at_the_one_before_and_leaves_its_own():
    scheduler, runner = scheduler_of(prefix_caching=True, snapshot_interval=256), FakeRunner()
    computed = []
    for name, fork in (("a", 600), ("b", 400), ("c", 400)):
        scheduler.add(make_related(name, 600, fork, max_tokens=1))
        computed.append(drain(scheduler, runner)[0])
    assert computed == [("a", 0, 512), ("b", 256, 600), ("c", 384, 600)]


def test_a_long_prompt_leaves_snapshots_along_the_way():
    scheduler, runner = scheduler_of(prefix_caching=True, snapshot_interval=128), FakeRunner()
    scheduler.add(make_related("a", 600, 600, max_tokens=1))
    drain(scheduler, runner)
    assert scheduler.memory.cache.num_snapshots == 5  # 128, 256, 384, 512 and the end at 576
    scheduler.add(make_related("b", 600, 400, max_tokens=1))
    assert drain(scheduler, runner)[0] == ("b", 384, 600)


def test_an_abort_between_launch_and_read_leaves_nothing_to_the_cache():
    scheduler, runner = scheduler_of(prefix_caching=True), FakeRunner()
    request = make_related("a", 300, 300, max_tokens=1)
    scheduler.add(request)
    plan = scheduler.next_plan()
    runner.launch(plan)
    scheduler.finish(request, "abort")
    scheduler.check_integrity()
    assert (scheduler.memory.cache.num_pages, scheduler.memory.cache.num_snapshots) == (0, 0)
    assert scheduler.memory.slots.available == scheduler.memory.slots.capacity


def test_an_aborted_prefill_leaves_only_what_was_computed():
    scheduler = scheduler_of(prefix_caching=True, chunked_prefill_size=128)
    runner = FakeRunner()
    request = make_related("a", 600, 600, max_tokens=1)
    scheduler.add(request)
    for expected in (2, 4):
        plan = scheduler.next_plan()
        runner.read(runner.launch(plan))
        scheduler.confirm(plan.rows[0])
        assert scheduler.memory.cache.num_pages == expected
    scheduler.next_plan()
    scheduler.finish(request, "abort")
    assert scheduler.memory.cache.num_pages == 4


def test_cached_pages_and_snapshots_make_room_for_requests():
    scheduler = scheduler_of(prefix_caching=True, num_pages=11, num_slots=3, max_running=2)
    runner = FakeRunner(num_pages=11, num_slots=3)
    for i, name in enumerate("abcd"):
        scheduler.add(make_related(name, 500, 10 * i, max_tokens=1))
        assert drain(scheduler, runner)[0] == (name, 0, 500)
        scheduler.check_integrity()
    assert scheduler.memory.pages.available + scheduler.memory.cache.num_pages == 10


def test_a_request_that_does_not_fit_yet_evicts_nothing():
    scheduler = scheduler_of(prefix_caching=True, num_pages=11, num_slots=5, max_running=3)
    runner = FakeRunner(num_pages=11, num_slots=5)
    scheduler.add(make_related("cached", 200, 0, max_tokens=1))
    drain(scheduler, runner)
    assert scheduler.memory.cache.num_pages == 3
    scheduler.add(make_related("running", 128, 10, max_tokens=65))  # 4 of the 10 pages
    runner.read(runner.launch(scheduler.next_plan()))
    scheduler.add(make_related("large", 500, 20, max_tokens=1))  # 8 pages, and 6 could be had
    for _ in range(3):
        scheduler.next_plan()
        assert scheduler.num_waiting == 1
        assert scheduler.memory.cache.num_pages == 3
    scheduler.finish(scheduler.admitted[0], "abort")
    plan = scheduler.next_plan()
    assert [row.request.request_id for row in plan.rows] == ["large"]
    scheduler.check_integrity()


def test_choosing_the_longest_prefix_looks_every_page_up_once_not_at_every_admission():
    scheduler = scheduler_of(prefix_caching=True, policy="lpm", max_running=1, num_pages=400)
    cache, memory = scheduler.memory.cache, scheduler.memory
    requests = [make_related(f"r{i}", 630, 64 * (i % 10), max_tokens=1) for i in range(50)]
    for request in requests:
        scheduler.add(request)
    key, cached_tokens, lookups = cache._key, memory.cached_tokens, []
    asked, admissions = [], 0

    def counted(request):
        cache._key = lambda *place: lookups.append(place) or key(*place)
        asked.append(request)
        found = cached_tokens(request)
        cache._key = key
        match = cache.match(request.cache_ids)
        cache.undo(match)
        assert found == match.tokens, "exact"
        return found

    memory.cached_tokens = counted
    while scheduler.has_work:
        plan = scheduler.next_plan()
        admissions += sum(row.start == row.request.cached for row in plan.rows)
        for row in plan.rows:
            scheduler.confirm(row)
            if row.is_last:
                scheduler.finish(row.request, "length")
    assert admissions == 50
    assert len(asked) >= 50 * 51 // 2, "at each admission, everyone who waits is asked"
    # Each time the next page after what is known, and each known page once.
    known = 9
    assert len(lookups) <= len(asked) + 50 * known
    assert memory._followed == {}
