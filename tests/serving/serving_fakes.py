"""A deterministic stand-in for the device, whose tokens depend on everything a scheduler can get wrong."""

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybridjax.configs import EngineConfig
from hybridjax.serving.api import RequestOutput, SamplingParams
from hybridjax.serving.engine import Engine
from hybridjax.serving.output import TextSource
from hybridjax.serving.plan import NotLaunchedError, Plan, PrefillPlan, PrefillRow, StepResult
from hybridjax.serving.request import Limits, Request, make_request
from hybridjax.serving.scheduler import Scheduler

MASK = 2**64 - 1
START = 0x9E3779B97F4A7C15
TOP = 20


def absorb(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token + 1442695040888963407) & MASK


def emit(state: int, vocab: int, attempt: int = 0) -> int:
    x = (state + attempt * START) & MASK
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & MASK
    return (x >> 20) % vocab


def choose(state: int, seed: int, position: int, params: SamplingParams, forbidden, vocab: int) -> int:
    """The model: greedy depends on the history, sampling on the seed and position as well."""
    if params.temperature:
        state = absorb(absorb(state, seed & MASK), position)
    attempt = 0
    while (token := emit(state, vocab, attempt)) in forbidden:
        attempt += 1
    return token


def expected_tokens(request: Request, vocab: int) -> list[int]:
    """What the model generates for a request that runs alone, one token at a time."""
    state = START
    for token in request.prompt_ids.tolist():
        state = absorb(state, token)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        position = request.prompt_length + len(tokens)
        below = position < request.min_position
        forbidden = request.device_stop_tokens if below else ()
        token = choose(state, request.seed, position, request.params, forbidden, vocab)
        tokens.append(token)
        if not below and token in request.stop_tokens:
            break
        state = absorb(state, token)
    return tokens


@dataclasses.dataclass
class Slot:
    """Recurrent state, number of tokens it has absorbed, and the token to be fed next."""

    state: int = 0
    length: int = -1
    last_token: int = -1


class FakeRunner:
    """Runs plans on "memory" addressed by page and slot, eagerly and in order.

    Broken contracts are collected in ``violations``. ``on_launch`` and ``on_read`` run in the engine's
    thread, before the step, and may raise.
    """

    def __init__(
        self,
        *,
        num_pages: int = 40,
        num_slots: int = 9,
        page_size: int = 64,
        max_decode_rows: int = 8,
        max_decode_steps: int = 64,
        max_prefill_tiles: int = 8,
        vocab_size: int = 101,
        context_length: int = 640,
        recoverable: bool = True,
    ):
        self.num_pages, self.num_slots, self.page_size = num_pages, num_slots, page_size
        self.max_decode_steps = max_decode_steps
        self.max_decode_rows, self.max_prefill_tiles = max_decode_rows, max_prefill_tiles
        self.vocab_size, self.context_length = vocab_size, context_length
        self.recoverable = recoverable
        self.on_launch: Callable[[Plan], None] = lambda plan: None
        self.on_read: Callable[[Plan], None] = lambda plan: None
        self.violations: list[str] = []
        self.plans: list[Plan] = []
        self.admitted: list[str] = []
        self.most_in_flight = 0
        self.recoveries = 0
        self.closed = 0
        self._in_flight: collections.deque[int] = collections.deque()
        self._results: dict[int, StepResult] = {}
        self._wipe()

    def admit(self, request: Request) -> None:
        self.admitted.append(request.request_id)
        self._slots[request.slot] = Slot()

    def launch(self, plan: Plan) -> int:
        self.on_launch(plan)
        self._check(plan)
        rows = [self._prefill(r) if isinstance(r, PrefillRow) else self._decode(r, plan) for r in plan.rows]
        tokens = np.array(rows, np.int32).T
        top = (None, None)
        if any(row.request.wants_top_logprobs for row in plan.rows):
            ids = np.broadcast_to(np.arange(TOP, dtype=np.int32), (*tokens.shape, TOP))
            top = ids, -ids.astype(np.float32)
        handle = len(self.plans)
        self.plans.append(plan)
        self._results[handle] = StepResult(tokens, -tokens.astype(np.float32) / 8, *top)
        self._in_flight.append(handle)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return handle

    def read(self, handle: int) -> StepResult:
        if handle != self._in_flight.popleft():
            self.violations.append("read out of order")
        self.on_read(self.plans[handle])
        return self._results.pop(handle)

    def recover(self) -> bool:
        if self._in_flight:
            self.violations.append("recover with steps in flight")
        self.recoveries += 1
        self._wipe()
        return self.recoverable

    def close(self) -> None:
        self.closed += 1

    def _wipe(self) -> None:
        rng = np.random.default_rng(self.__dict__.get("recoveries", 0))
        self._pages = rng.integers(0, self.vocab_size, (self.num_pages, self.page_size))
        self._slots = [Slot() for _ in range(self.num_slots)]

    def _check(self, plan: Plan) -> None:
        requests = [row.request for row in plan.rows]
        slots = {request.slot for request in requests}
        written = [page for row in plan.rows for page in self._written(row)]
        read = {page for row in plan.rows for page in row.request.pages} - set(written)
        self._expect(bool(plan.rows), "empty plan")
        self._expect(len(slots) == len(requests) and 0 not in slots, "slots shared or missing")
        self._expect(len(set(written)) == len(written) and 0 not in written, "a page is written twice")
        self._expect(0 not in read, "page 0 is read")
        others = [page for row in plan.rows for page in set(row.request.pages) - set(self._written(row))]
        self._expect(not set(others) & set(written), "a page is written under a reader")
        self._expect(all(request.finish_reason is None for request in requests), "finished request planned")
        self._expect(all(row.epoch == row.request.epoch for row in plan.rows), "preempted request planned")
        if isinstance(plan, PrefillPlan):
            kept = [slot for row in plan.rows for _, slot in row.snapshots]
            self._expect(len(set(kept)) == len(kept) and not slots & set(kept), "a snapshot's slot is in use")
            tiles = sum(-(-(row.end - row.start) // 64) for row in plan.rows)
            self._expect(tiles <= self.max_prefill_tiles, f"{tiles} tiles")
            self._expect(all(row.start % 64 == 0 for row in plan.rows), "chunk off the grid")
            self._expect(all(row.is_last or row.end % 64 == 0 for row in plan.rows), "cut off the grid")
        else:
            self._expect(len(plan.rows) <= self.max_decode_rows, f"{len(plan.rows)} rows")
            self._expect(all(1 <= row.steps <= plan.num_steps for row in plan.rows), "steps out of range")

    def _written(self, row) -> list[int]:
        """The pages that a row writes; all others of its request are only read."""
        start, end = (
            (row.start, row.end)
            if isinstance(row, PrefillRow)
            else (
                row.position,
                row.position + row.steps,
            )
        )
        return row.request.pages[start // self.page_size : -(-end // self.page_size)]

    def _expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.violations.append(problem)

    def _feed(self, request: Request, position: int, token: int) -> None:
        slot = self._slots[request.slot]
        if position == 0:
            slot.state, slot.length = START, 0
        self._expect(slot.length == position, f"position {position} after {slot.length} tokens")
        self._expect(0 <= position < request.limit, f"position {position} beyond {request.limit}")
        self._pages[request.pages[position // self.page_size], position % self.page_size] = token
        slot.state = absorb(slot.state, token)
        slot.length = position + 1

    def _sample(self, request: Request, forced: Sequence[int] = ()) -> int:
        """Both the slot's state and the history read back from the pages decide the token."""
        slot = self._slots[request.slot]
        state = START
        for token in self._pages[request.pages].reshape(-1)[: slot.length].tolist():
            state = absorb(state, token)
        if state != slot.state:
            state = (state + slot.state) & MASK  # a wrong token rather than a crash
        below = slot.length < request.min_position
        forbidden = request.device_stop_tokens if below else ()
        args = (state, request.seed, slot.length, request.params, forbidden, self.vocab_size)
        slot.last_token = choose(*args)
        for token in forced:
            self._expect(token == slot.last_token, f"token {token} is forced, not {slot.last_token}")
            slot.last_token = token
        return slot.last_token

    def _prefill(self, row: PrefillRow) -> list[int]:
        if row.start and row.initial_slot != row.request.slot:
            source = self._slots[row.initial_slot]
            self._slots[row.request.slot] = Slot(source.state, source.length)
        kept = dict(row.snapshots)
        for position in range(row.start, row.end):
            self._feed(row.request, position, int(row.request.prompt_ids[position]))
            if slot := kept.pop(position + 1, 0):
                self._expect((position + 1) % 64 == 0, "snapshot off the grid")
                now = self._slots[row.request.slot]
                self._slots[slot] = Slot(now.state, now.length)
        self._expect(not kept, "a snapshot outside its chunk")
        return [self._sample(row.request, row.forced) if row.is_last else -1]

    def _decode(self, row, plan) -> list[int]:
        tokens = [-1] * plan.num_steps
        for step in range(row.steps):
            self._feed(row.request, row.position + step, self._slots[row.request.slot].last_token)
            tokens[step] = self._sample(row.request, row.forced[step : step + 1])
            if tokens[step] in row.request.device_stop_tokens:
                # The device leaves the row here; a step launched meanwhile feeds rubbish from the same
                # position on as a device would.
                self._slots[row.request.slot].length = row.position + row.steps
                break
        return tokens


class FakeTokenizer:
    """Token i is the text ``texts[i]``."""

    def __init__(self, texts: Sequence[str] | None = None):
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.texts = texts or [letters[i % 26] * (i % 3) for i in range(101)]

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 101 for c in text]


class FakeText:
    """Every token's text is certain at once, except that tokens divisible by 7 wait for the next one."""

    def __init__(self, tokenizer: FakeTokenizer, skip_special_tokens: bool = True, delay: int = 7):
        self._texts = tokenizer.texts
        self._delay = delay
        self._waiting = ""

    def push(self, ids: Sequence[int], /) -> str:
        out = ""
        for token in ids:
            out, self._waiting = out + self._waiting, ""
            if self._delay and token % self._delay == 0:
                self._waiting = self._texts[token]
            else:
                out += self._texts[token]
        return out

    def flush(self) -> str:
        out, self._waiting = self._waiting, ""
        return out


def make_text_source(tokenizer: FakeTokenizer, skip_special_tokens: bool) -> TextSource:
    return FakeText(tokenizer, skip_special_tokens)


def refuse(plan: Plan) -> None:
    raise NotLaunchedError("refused by the test")


class Recorder:
    """Collects the events of requests and waits for their last ones."""

    def __init__(self):
        self.events: dict[str, list[RequestOutput]] = collections.defaultdict(list)
        self._finished: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, event: RequestOutput) -> None:
        self.events[event.request_id].append(event)
        if event.finish_reason is not None:
            self._finished.put(event.request_id)

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            self._finished.get(timeout=60)

    def reason(self, request_id: str) -> str | None:
        """The request's finish reason, after checking that only its last event has one."""
        reasons = [event.finish_reason for event in self.events[request_id]]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(event.text for event in self.events[request_id])


def engine_of(runner: FakeRunner, *, tokenizer: FakeTokenizer | None = None, **fields) -> Engine:
    return Engine.from_parts(
        EngineConfig(**fields),
        runner,
        tokenizer,
        eos_tokens=(2, 3),
        make_text_source=make_text_source,
    )


def alone(engine: Engine, prompt, params: SamplingParams) -> list[int]:
    """What the model generates for a prompt when nothing else runs."""
    limits = Limits(engine.info.context_length, engine.info.vocab_size, (2, 3))
    request = make_request("alone", prompt, params, limits, seed=0)
    return expected_tokens(request, engine.info.vocab_size)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, 101, length).tolist()


@contextlib.contextmanager
def serving(runner: FakeRunner | None = None, **fields) -> Iterator[tuple[Engine, FakeRunner]]:
    """An engine on a fake runner; checks at the end that contracts were kept and nothing is held."""
    runner = runner or FakeRunner()
    with engine_of(runner, **fields) as engine:
        yield engine, runner
    engine.check_integrity()
    assert runner.violations == []
    assert runner.closed == 1
    assert not engine.is_healthy


def submit_together(engine, runner, recorder, requests, then=None):
    """Submits several requests while the first one's launch is held, so that the order is certain."""
    entered, release = threading.Event(), threading.Event()

    def hold(plan):
        if not entered.is_set():
            entered.set()
            assert release.wait(60)
        if then is not None:
            then(plan)

    runner.on_launch = hold
    for i, (name, length, params) in enumerate(requests):
        engine.submit(prompt_of(length), params, recorder, request_id=name)
        if i == 0:
            assert entered.wait(60)
    release.set()


LIMITS = Limits(context_length=640, vocab_size=101, eos_tokens=(2, 3))
TRUNK = np.random.default_rng(7).integers(0, 101, 640)


def make_related(name: str, length: int, fork: int, **params) -> Request:
    """A prompt that follows a common trunk up to ``fork`` and then goes its own way."""
    prompt = TRUNK[:length].copy()
    prompt[fork:] = np.random.default_rng(sum(map(ord, name))).integers(0, 101, max(0, length - fork))
    return make_request(name, prompt, SamplingParams(**params), LIMITS, seed=11)


def scheduler_of(**changes) -> Scheduler:
    arguments: dict = {
        "num_pages": 40,
        "num_slots": 9,
        "page_size": 64,
        "max_running": 8,
        "max_prefill_tiles": 8,
        "num_decode_steps": 4,
    }
    return Scheduler(**(arguments | changes))


class Driver:
    """Runs a scheduler on a fake device; ``lag`` steps are launched before the first one is read."""

    def __init__(self, lag=0, **changes):
        self.scheduler = scheduler_of(**changes)
        arguments = {k: v for k, v in changes.items() if k in ("num_pages", "num_slots")}
        self.runner = FakeRunner(**arguments)
        self.lag, self.in_flight, self.plans = lag, [], []

    def step(self):
        """Launches the next plan and reads what is due; returns the plan."""
        plan = self.scheduler.next_plan()
        if plan is not None:
            self.in_flight.append((plan, self.runner.launch(plan)))
            self.plans.append(plan)
        if len(self.in_flight) > (self.lag if plan is not None else 0):
            old, handle = self.in_flight.pop(0)
            result = self.runner.read(handle)
            for column, row in enumerate(old.rows):
                if self.scheduler.is_current(row):
                    self.scheduler.confirm(row)
                    new = result.tokens[len(row.forced) :, column]
                    row.request.output += [int(t) for t in new if t >= 0]
                    if len(row.request.output) == row.request.max_tokens:
                        self.scheduler.finish(row.request, "length")
        self.scheduler.check_integrity()
        assert self.runner.violations == []
        return plan

    def finish(self, *requests):
        while self.scheduler.has_work or self.in_flight:
            self.step()
            assert len(self.plans) < 5000, "nothing gets on"
        for request in requests:
            assert request.output == expected_tokens(request, 101)


def long_output(name, length=60, tokens=200, **params):
    return make_related(name, length, 0, max_tokens=tokens, ignore_eos=True, **params)
