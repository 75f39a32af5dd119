"""How much prefill comes between decode steps: the pace by itself, and a scheduler on times of our own."""

from serving_fakes import Driver, long_output, make_related

from hybridjax.serving.pacing import Pace
from hybridjax.serving.plan import DecodePlan, PrefillPlan


def measured(pace, tiles, seconds):
    pace.launched(tiles)
    pace.took(seconds)


def test_prefill_steps_are_made_to_fit_between_decode_steps():
    pace = Pace(0.5, (1, 2, 8))
    assert pace.tiles(8) == 8, "nothing is known yet"
    measured(pace, 0, 0.020)
    measured(pace, 8, 0.100)
    assert pace.owes
    for _ in range(5):
        assert pace.owes
        measured(pace, 0, 0.020)
    assert not pace.owes
    assert pace.tiles(8) == 1, "a step of 8 takes too long, and one of 2 has not been seen"
    measured(pace, 1, 0.008)
    assert pace.tiles(8) == 2, "2 tiles cannot take more than twice as long as one"
    measured(pace, 2, 0.012)
    assert pace.tiles(8) == 2


def test_prefill_steps_are_not_made_so_small_that_they_waste_time():
    """A step of 2 tiles takes two thirds of one of 8, since either reads all weights."""
    pace = Pace(0.5, (2, 8))
    measured(pace, 0, 0.020)
    measured(pace, 8, 0.060)
    assert pace.tiles(8) == 2, "tried, as nothing is known of it"
    measured(pace, 2, 0.040)
    assert pace.tiles(8) == 8
    for _ in range(20):
        measured(pace, 0, 0.020)
    measured(pace, 8, 0.060)
    for _ in range(3):
        assert pace.owes, "what is longer than a decode dispatch is still paid back"
        measured(pace, 0, 0.020)
    assert not pace.owes


def test_larger_steps_are_tried_after_a_short_first_prompt():
    """A step costs 30 ms and 1 ms a tile: what small steps take says nothing of large ones."""
    pace = Pace(0.45, (2, 8, 32))
    pace.launched(2, 0.0)
    pace.took(0.032)
    measured(pace, 0, 0.024)
    used = []
    for _ in range(4):
        used.append(pace.tiles(32))
        measured(pace, used[-1], 0.030 + 0.001 * used[-1])
        while pace.owes:
            measured(pace, 0, 0.024)
    assert used == [8, 32, 32, 32]


def test_an_absurd_first_sample_does_not_leave_the_smallest_step_alone():
    pace = Pace(0.45, (1, 4, 16))
    measured(pace, 16, 60.0)
    measured(pace, 0, 0.030)
    for _ in range(6):
        measured(pace, pace.tiles(16), 0.010 + 0.0005 * pace.tiles(16))
        while pace.owes:
            measured(pace, 0, 0.030)
    assert pace.tiles(16) == 4, "16 would take up to four times as long, too long beside 30 ms"


def test_prompts_without_room_do_not_count_as_waiting():
    driver = Driver(num_pages=30, max_running=8, num_slots=9)
    driver.scheduler.add(long_output("decoding", 60, 300))
    driver.step()
    assert driver.scheduler._delayed() == 1.0
    for i in range(6):
        driver.scheduler.add(make_related(f"r{i}", 100, 0, max_tokens=2))
    assert driver.scheduler._delayed() == 1 / 6
    driver = Driver(num_pages=8, max_running=8, num_slots=9)
    driver.scheduler.add(long_output("decoding", 60, 300))
    driver.step()
    for i in range(6):
        driver.scheduler.add(make_related(f"r{i}", 400, 0, max_tokens=2))
    assert driver.scheduler._delayed() == 1.0


def test_decoding_counts_less_the_more_requests_wait():
    """One decodes and four wait: a quarter of what the step takes is owed, not as much."""
    pace = Pace(0.5, (8,))
    measured(pace, 0, 0.010)
    pace.launched(8, 0.25)
    pace.took(0.080)
    for _ in range(2):
        assert pace.owes
        measured(pace, 0, 0.010)
    assert not pace.owes


def test_a_wave_of_prompts_decodes_together():
    """Eight prompts at once, steps as measured on a GPU: those who decode do not hold up those who wait."""
    sizes = {"max_running": 8, "num_slots": 9, "num_pages": 100, "max_prefill_tiles": 8}
    driver = Driver(**sizes, prefill_share=0.45, prefill_sizes=(2, 8), lag=1)
    requests = [make_related(f"r{i}", 512, 0, max_tokens=64, ignore_eos=True) for i in range(8)]
    for request in requests:
        driver.scheduler.add(request)
    total = 0.0
    while driver.scheduler.has_work or driver.in_flight:
        known = len(driver.plans)
        driver.step()
        for plan in driver.plans[known:]:
            tiles = sum(row.tiles for row in plan.rows) if isinstance(plan, PrefillPlan) else 0
            seconds = (0.018 if tiles <= 2 else 0.030) if tiles else 0.006 * (1 + 0.03 * len(plan.rows))
            driver.scheduler.pace.took(seconds)
            total += seconds
    assert total < 1.5 * (8 * 0.030 + 64 * 0.0074)


def test_a_slow_sample_does_not_stay():
    pace = Pace(0.5, (1, 8))
    measured(pace, 8, 30.0)  # it compiled
    measured(pace, 0, 0.1)
    assert pace.tiles(8) == 1
    for _ in range(20):
        measured(pace, 1, 0.01)
        measured(pace, 0, 0.1)
    assert pace.tiles(8) == 8
    for _ in range(200):
        if not pace.owes:
            break
        measured(pace, 0, 0.1)
    assert not pace.owes, "what is owed is bounded"


def test_a_full_share_means_alternation():
    pace = Pace(1.0, (1, 8))
    measured(pace, 0, 0.001)
    measured(pace, 8, 10.0)
    assert not pace.owes
    assert pace.tiles(8) == 8


def test_decoding_goes_first_while_prefill_owes():
    driver = Driver(num_pages=100, prefill_share=0.5, prefill_sizes=(1, 8), max_running=4)
    driver.scheduler.add(long_output("decoding", 10, 300))
    driver.step()
    driver.scheduler.add(make_related("long", 630, 0, max_tokens=2))
    seconds = {PrefillPlan: 0.05, DecodePlan: 0.01}
    kinds = []
    for _ in range(40):
        plan = driver.step()
        driver.scheduler.pace.took(seconds[type(plan)])
        kinds.append(type(plan))
    last = max(i for i, kind in enumerate(kinds) if kind is PrefillPlan)
    prefill = sum(kind is PrefillPlan for kind in kinds[: last + 1])
    assert prefill * 0.05 <= 1.5 * (last + 1 - prefill) * 0.01 + 0.1


def test_decoding_that_is_faster_than_expected_owes_nothing():
    pace = Pace(1.0, (1, 8))
    for seconds in (0.02, 0.01, 0.001):
        measured(pace, 0, seconds)
        assert not pace.owes
    pace = Pace(0.5, (1, 8))
    measured(pace, 0, 0.02)
    measured(pace, 0, 0.001)
    assert not pace.owes, "no prefill has been delayed for"
