"""Requests with grammars: a step at a time, when their masks are there, and without holding others up."""

import numpy as np
from serving_fakes import LIMITS, scheduler_of

from hybridjax.serving.api import SamplingParams
from hybridjax.serving.plan import DecodePlan, PrefillPlan
from hybridjax.serving.request import make_request


class Mask:
    """A matcher of which the scheduler sees only whether its next mask has been computed."""

    def __init__(self):
        self.ready = True
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return self.ready


def serve(scheduler, *names: str, **params):
    """Admits requests and prefills them; those whose names begin with g have a matcher."""
    requests = []
    for name in names:
        request = make_request(
            name, np.arange(5), SamplingParams(**{"max_tokens": 50, **params}), LIMITS, seed=1
        )
        request.matcher = Mask() if name.startswith("g") else None
        scheduler.add(request)
        requests.append(request)
    while not all(request.scheduled >= request.prompt_length for request in requests):
        plan = scheduler.next_plan()
        confirm(scheduler, plan)
    return requests


def confirm(scheduler, plan):
    for row in plan.rows:
        scheduler.confirm(row)
        generated = 1 if isinstance(plan, PrefillPlan) else row.steps
        row.request.output.extend([7] * generated)


def steps(plan) -> dict[str, int]:
    assert isinstance(plan, DecodePlan)
    return {row.request.request_id: row.steps for row in plan.rows}


def test_a_grammars_request_takes_one_step_when_its_last_token_is_known():
    scheduler = scheduler_of(num_decode_steps=4)
    serve(scheduler, "g", "plain")
    first = scheduler.next_plan()
    assert steps(first) == {"g": 1, "plain": 4}
    assert steps(scheduler.next_plan()) == {"plain": 4}  # the first plan has not been read
    confirm(scheduler, first)
    assert steps(scheduler.next_plan()) == {"g": 1, "plain": 4}


def test_a_late_mask_holds_nobody_up():
    scheduler = scheduler_of(num_decode_steps=2)
    slow, quick, plain = serve(scheduler, "g slow", "g quick", "plain")
    slow.matcher.ready = False
    plan = scheduler.next_plan()
    assert steps(plan) == {"g quick": 1, "plain": 2}
    assert 0 < slow.matcher.waited[0] < 0.1 and not quick.matcher.waited
    confirm(scheduler, plan)
    slow.matcher.ready = True
    assert steps(scheduler.next_plan()) == {"g slow": 1, "g quick": 1, "plain": 2}


def test_late_masks_are_waited_for_together():
    scheduler = scheduler_of(num_decode_steps=1)
    requests = serve(scheduler, "g 1", "g 2", "g 3", "plain")
    for request in requests[:3]:
        request.matcher.ready = False
    assert steps(scheduler.next_plan()) == {"plain": 1}
    waited = [request.matcher.waited[0] for request in requests[:3]]
    assert waited == sorted(waited, reverse=True)


def test_with_nothing_else_to_do_a_late_mask_is_launched_which_waits_for_it():
    scheduler = scheduler_of(num_decode_steps=1)
    slow, plain = serve(scheduler, "g", "plain")
    slow.matcher.ready = False
    plan = scheduler.next_plan()
    assert steps(plan) == {"plain": 1}
    scheduler.finish(plain, "abort")
    assert steps(scheduler.next_plan()) == {"g": 1}


def test_while_a_step_is_in_flight_a_late_mask_can_wait():
    scheduler = scheduler_of(num_decode_steps=1)
    slow, plain = serve(scheduler, "g", "plain", max_tokens=2)
    slow.matcher.ready = False
    last = scheduler.next_plan()
    assert steps(last) == {"plain": 1} and plain.scheduled == plain.limit
    assert scheduler.next_plan() is None
    confirm(scheduler, last)
    scheduler.finish(plain, "length")
    assert steps(scheduler.next_plan()) == {"g": 1}
