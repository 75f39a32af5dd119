"""There is always a plan while work is left and nothing is in flight, whatever the schedule."""

import collections
import random

import pytest
from serving_fakes import make_related, scheduler_of

from hybridjax.serving.plan import PrefillPlan, PrefillRow


def emitted(row) -> int:
    steps = int(row.is_last) if isinstance(row, PrefillRow) else row.steps
    return steps - len(row.forced)


def confirm(scheduler, plan):
    """Reads a plan's step; requests end at their limits."""
    for row in plan.rows:
        if scheduler.is_current(row):
            scheduler.confirm(row)
            row.request.output += [7] * emitted(row)
            if len(row.request.output) == row.request.max_tokens:
                scheduler.finish(row.request, "length")


def starts(plan) -> list[tuple[str, int]]:
    assert isinstance(plan, PrefillPlan)
    return [(row.request.request_id, row.start) for row in plan.rows]


def overtaking(num_pages: int):
    """A prompt of high priority that needs nearly all pages and is too long for its turn. What overtakes it
    resumes at a snapshot, which is protected until the step is launched, and a long prompt is under way."""
    scheduler = scheduler_of(
        num_pages=num_pages, prefix_caching=True, priorities=True, max_prefill_tiles=6, num_decode_steps=1
    )
    scheduler.add(make_related("warm", 129, 129, max_tokens=1))
    confirm(scheduler, scheduler.next_plan())
    scheduler.tile_budget = 3
    scheduler.add(make_related("long", 570, 129, max_tokens=1))
    first = scheduler.next_plan()
    assert starts(first) == [("long", 128)]
    confirm(scheduler, first)
    scheduler.tile_budget = 6
    urgent = make_related("urgent", 630, 0, max_tokens=1)
    urgent.priority = 1
    scheduler.add(make_related("short", 129, 128, max_tokens=1))
    scheduler.add(urgent)
    return scheduler, urgent


def test_who_was_preempted_in_vain_or_refused_is_tried_again_at_once():
    scheduler, urgent = overtaking(num_pages=11)
    requests = scheduler.unfinished
    plan = scheduler.next_plan()
    assert starts(plan) == [("urgent", 0)]
    while scheduler.has_work:
        confirm(scheduler, plan)
        plan = scheduler.next_plan()
    assert [request.finish_reason for request in requests] == ["length"] * 3


def test_a_refusal_holds_only_as_long_as_what_it_met_is_protected():
    """Somebody decodes, so there is always a plan; who was refused need not wait for that to end."""
    scheduler, urgent = overtaking(num_pages=12)
    decoding = make_related("decoding", 10, 0, max_tokens=50, ignore_eos=True)
    decoding.priority = 2
    scheduler.add(decoding)
    for _ in range(8):
        confirm(scheduler, scheduler.next_plan())
        scheduler.check_integrity()
    assert urgent.admitted is not None and decoding.finish_reason is None


class Simulation:
    """Random arrivals, ends, preemptions and steps of random sizes on little memory."""

    def __init__(self, seed: int):
        self.draw = draw = random.Random(seed)
        page_size, slots, tiles = draw.choice([16, 64, 128]), draw.randint(2, 9), draw.randint(1, 8)
        self.most_tokens = draw.choice([1, 1, 3, 40])
        self.scheduler = scheduler_of(
            num_pages=draw.choice([640, 640, 704, 1280]) // page_size + 1,
            num_slots=slots,
            page_size=page_size,
            max_prefill_tiles=tiles,
            num_decode_steps=draw.randint(1, 5),
            max_running=draw.choice([1, slots, slots]),
            prefix_caching=draw.random() < 0.9,
            snapshot_interval=draw.choice([128, 256, 8192]),
            policy=draw.choice(["fcfs", "lpm"]),
            priorities=draw.random() < 0.9,
        )
        self.tiles, self.lag = tiles, draw.randint(0, 2)
        self.to_come = 25
        self.in_flight = collections.deque()
        self.requests = []

    def arrive(self):
        self.to_come -= 1
        length = self.draw.choice([1, 64, 65, 129, 129, 200, 300, 570, 630])
        request = make_related(
            f"r{self.to_come}",
            length,
            self.draw.choice([0, 64, 128, 128, 192, 300, 600]),
            max_tokens=self.draw.randint(1, min(self.most_tokens, 640 - length)),
            ignore_eos=True,
        )
        # Long prompts are often urgent, so that others both overtake them and must give way to them.
        request.priority = self.draw.randint(-2, 2) + (length > 500)
        self.scheduler.add(request)
        self.requests.append(request)

    def disturb(self):
        draw, scheduler = self.draw, self.scheduler
        if draw.random() < 0.02 and scheduler.admitted:
            scheduler.preempt(draw.choice(scheduler.admitted))
        if draw.random() < 0.03 and scheduler.has_work:
            scheduler.finish(draw.choice(scheduler.unfinished), "abort")
        if draw.random() < 0.02:
            scheduler.flush_cache()

    def run(self):
        """Until every request has ended."""
        draw, scheduler = self.draw, self.scheduler
        for _ in range(3000):
            if self.to_come and draw.random() < 0.5:
                self.arrive()
            if not (self.to_come or scheduler.has_work or self.in_flight):
                break
            scheduler.tile_budget = draw.randint(1, self.tiles)  # as pacing chooses it
            plan = scheduler.next_plan() if len(self.in_flight) <= self.lag else None
            if plan is not None:
                self.in_flight.append(plan)
            assert self.in_flight or not scheduler.has_work, "a stall"
            self.disturb()
            if self.in_flight and (plan is None or draw.random() < 0.5):
                confirm(scheduler, self.in_flight.popleft())
            scheduler.check_integrity()
        assert all(request.finish_reason for request in self.requests), "endless"


@pytest.mark.parametrize("part", range(4))
def test_no_schedule_stalls(part):
    for seed in range(75):
        Simulation(1000 * part + seed).run()
