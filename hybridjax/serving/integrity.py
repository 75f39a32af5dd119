"""Whether the scheduler's queues, the requests' lengths and the pools agree with each other."""

from collections.abc import Collection, Iterable

from hybridjax.batch import TILE
from hybridjax.serving.memory import StateMemory
from hybridjax.serving.pools import PoolError
from hybridjax.serving.request import Request


def check_integrity(
    waiting: Iterable[Request],
    prefilling: Collection[Request],
    running: Collection[Request],
    memory: StateMemory,
) -> None:
    """Raises PoolError for the first contradiction. Modifies nothing."""
    for request in waiting:
        _require(not request.slot and not request.pages, request, "holds something while waiting")
        _require(request not in prefilling and request not in running, request, "waits and runs")
    admitted = (*running, *prefilling)
    for request in admitted:
        _check_admitted(request, memory)
        in_prefill = request.scheduled < request.prompt_length
        _require((request in prefilling) == in_prefill, request, "is in the wrong queue")
    memory.check_integrity(admitted)


def _check_admitted(r: Request, memory: StateMemory) -> None:
    ordered = 0 <= r.cached <= r.computed <= r.scheduled <= r.limit
    _require(ordered, r, f"has lengths {r.cached}, {r.computed}, {r.scheduled}, {r.limit}")
    _require(r.finish_reason is None, r, "is finished but admitted")
    _require(r.slot > 0, r, "runs without a slot")
    least = memory.pages_for(max(r.scheduled, r.prompt_length))
    enough = least <= len(r.pages) <= r.pages_needed(memory.page_size)
    _require(enough, r, f"holds {len(r.pages)} pages for {r.scheduled} tokens")
    on_grid = r.scheduled >= r.prompt_length or r.scheduled % TILE == 0
    _require(on_grid, r, f"was cut at {r.scheduled}")


def _require(condition: bool, request: Request, problem: str) -> None:
    if not condition:
        raise PoolError(f"request {request.request_id} {problem}")
