"""The engine's thread: takes requests from any thread and runs them on a runner.

The loop launches step n+1 before it reads step n: take new requests and aborts, plan, launch, and
only then wait for the oldest step in flight. Every accepted request gets exactly one last event,
whatever fails: its own processing (only this request ends), a step or planning (the requests that hold
memory end), planning again (those that wait, too), or the loop itself (all end).
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from hybridjax.errors import EngineDeadError, GrammarError, HybridJaxError, QueueFullError, RequestError
from hybridjax.serving.api import EngineStats, FinishReason, RequestOutput
from hybridjax.serving.live import Calls, Entry, LiveRequests
from hybridjax.serving.plan import DecodeRow, Handle, NotLaunchedError, Plan, PrefillRow, Runner, StepResult
from hybridjax.serving.pools import PoolError
from hybridjax.serving.request import Request
from hybridjax.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_STEP_FAILED = "a step failed on the device; the server's log says why"


class EngineLoop:
    """Runs accepted requests to their last event.

    ``add``, ``abort``, ``check_integrity`` and ``stop`` may be called from any thread, also from within
    ``on_output``. Everything else, and the scheduler and the runner with it, belongs to the loop's thread.

    Args:
      scheduler: owned by the loop from now on.
      runner: owned likewise; closed when the loop ends.
      overlap: launch a step before the previous one has been read.
      max_queued: requests that may wait for admission.
      clock: seconds, for what steps take.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._depth = 1 if overlap else 0
        self._max_queued = max_queued
        self._in_flight: collections.deque[tuple[Plan, Handle]] = collections.deque()
        # When the device had done the last step that was read, or had nothing to do.
        self._device_since = 0.0
        self._next_check = 0.0
        self._pools_suspect = False
        self._planning_failed = False
        # Shared between threads, guarded by the condition's lock.
        self._condition = threading.Condition()
        self._last_stats = scheduler.stats()
        self._live = LiveRequests(self._condition)
        self._inbox: list[Entry] = []
        self._aborts: list[Entry] = []
        self._calls = Calls(self._condition)
        self._stopping = False
        # Requests and calls are taken no more; the scheduler is still the thread's until the thread ends.
        self._ended = False
        self._failed = False
        # For the watchdog: how often the loop has got on, whether it waits for work, whether it was given up.
        self._beats = 0
        self._idle = False
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="hybridjax-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are taken."""
        return not self._stopping and not self._ended and self._thread.is_alive()

    @property
    def pulse(self) -> int | None:
        """See watchdog.Watched."""
        may_take_its_time = self._idle or self._ended or getattr(self._runner, "is_compiling", False)
        return None if may_take_its_time or self._thread.ident is None else self._beats

    def give_up(self, why: str) -> None:
        """Ends every request with an error although the loop's thread hangs; it takes no more of them.

        The thread is left to itself, and the scheduler and the runner with it.
        """
        with self._condition:
            if self._ended:
                return
            self._stopping = self._ended = self._failed = self._given_up = True
            self._condition.notify()
        self._live.give_up(why)
        self._calls.refuse(EngineDeadError(why))

    @property
    def stats(self) -> EngineStats:
        """The scheduler's last snapshot, with what has arrived since; from any thread."""
        with self._condition:
            last, inbox = self._last_stats, len(self._inbox)
        memory = self._scheduler.memory
        pages, slots = memory.pages.capacity, memory.slots.capacity
        return EngineStats(
            running=last.prefilling + last.running,
            waiting=last.waiting + inbox,
            used_pages=pages - last.free_pages,
            total_pages=pages,
            used_slots=slots - last.free_slots,
            total_slots=slots,
            preempted=last.preempted,
        )

    def check_accepts(self, request_ids: Sequence[str] = (), *, bounded: bool = True) -> None:
        """Raises what ``add`` would raise for these ids now. Modifies nothing."""
        with self._condition:
            if self._stopping or self._ended:
                why = "failed; its log says why" if self._failed else "has been shut down"
                raise EngineDeadError(f"the engine {why}")
            if bounded and len(self._inbox) + self._scheduler.num_waiting >= self._max_queued:
                raise QueueFullError(f"{self._max_queued} requests are waiting already")
            seen: set[str] = set()
            for request_id in request_ids:
                if request_id in self._live or request_id in seen:
                    raise RequestError(
                        f"request_id {request_id!r} is in use",
                        param="request_id",
                        code="duplicate_request_id",
                    )
                seen.add(request_id)

    def add(self, entries: Sequence[Entry], *, bounded: bool = True) -> None:
        """Accepts requests, all or none; each gets exactly one last event from now on.

        Raises:
          EngineDeadError: the loop has ended or is about to.
          QueueFullError: too many requests wait (only if ``bounded``).
          RequestError: a request id is in use.
        """
        with self._condition:
            self.check_accepts([entry.request.request_id for entry in entries], bounded=bounded)
            self._live.add(entries)
            self._inbox.extend(entries)
            self._condition.notify()

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; an unknown or finished id is ignored."""
        with self._condition:
            entry = self._live.named(request_id)
            if entry is not None:
                self._aborts.append(entry)
                self._condition.notify()

    def stop(self) -> None:
        """Aborts everything, ends the thread and closes the runner; idempotent, waits for the end.

        From within ``on_output`` it does not wait.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        is_other = threading.current_thread() is not self._thread and self._thread.ident is not None
        if is_other and not self._given_up:
            self._thread.join()

    def check_integrity(self) -> None:
        """Raises PoolError unless queues, lengths and pools agree. Checked between two steps."""
        self._between_steps(self._scheduler.check_integrity)

    def flush_cache(self) -> None:
        """Forgets every cached prefix, between two steps."""
        self._between_steps(self._scheduler.flush_cache)

    def _between_steps(self, call: Callable[[], None]) -> None:
        """Runs ``call`` in the loop's thread, or here once that thread has ended; raises what it raises."""
        is_own = threading.current_thread() is self._thread
        with self._condition:
            if self._given_up:
                raise EngineDeadError("the engine hangs; its log says where")
            done = None
            if not (self._ended or is_own):
                done = self._calls.add(call)
                self._condition.notify()
        if done is not None:
            done.result()
        elif is_own:
            call()
        else:
            self._thread.join()
            with self._condition:
                call()

    def _run(self) -> None:
        try:
            while self._take():
                self._beats += 1
                self._step()
        except BaseException:
            logger.exception("the engine has failed")
            self._failed = True
        finally:
            self._end_all()

    def _take(self) -> bool:
        """Waits for something to do and takes what other threads have asked for; False to stop."""
        with self._condition:
            while not (
                self._stopping
                or self._inbox
                or self._aborts
                or self._calls
                or self._in_flight
                or self._scheduler.has_work
            ):
                self._idle = True
                self._condition.wait()
            self._idle = False
            if self._stopping:
                return False
            inbox, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
            refused = [entry for entry in inbox if not self._queue(entry)]
            self._last_stats = self._scheduler.stats()
        for entry in refused:
            self._end(entry, "error", error="internal error")
        for entry in aborts:
            self._end(entry, "abort")
        self._calls.run()
        return True

    def _queue(self, entry: Entry) -> bool:
        try:
            self._scheduler.add(entry.request)
        except Exception:
            logger.exception("request %s cannot be queued", entry.request.request_id)
            return False
        return True

    def _step(self) -> None:
        """Launches the next plan, if any, and reads the oldest step unless it can stay in flight."""
        for request in self._scheduler.expired():
            entry = self._live.find(request)
            if entry is not None:
                self._end(entry, "timeout")
        plan = self._plan()
        launched = plan is not None and self._launch(plan)
        if self._in_flight and (not launched or len(self._in_flight) > self._depth):
            self._read_oldest()
        if not self._scheduler.has_work and not self._in_flight:
            self._check_when_idle()
        if self._pools_suspect:
            self._reset_pools(self._scheduler.holding)
        self._last_stats = self._scheduler.stats()

    def _plan(self) -> Plan | None:
        """The next plan; None if there is none or planning has failed.

        A failure ends all requests that hold memory, which may not be theirs. If fresh pools do not help,
        those that wait must be the problem, and end too.
        """
        try:
            plan = self._scheduler.next_plan()
            if plan is None and not self._in_flight and self._scheduler.has_work:
                raise PoolError("nothing can be planned although requests are unfinished")
        except Exception:
            logger.exception("planning a step has failed")
            self._scheduler.pace.keep(len(self._in_flight))
            again, self._planning_failed = self._planning_failed, True
            self._reset_pools(self._scheduler.unfinished if again else self._scheduler.holding)
            return None
        self._planning_failed = False
        return plan

    def _launch(self, plan: Plan) -> bool:
        """Launches a plan without the rows that turn out to be impossible; False if nothing is left of it."""
        while plan.rows:
            try:
                for row in plan.rows:
                    if isinstance(row, PrefillRow) and row.start == row.request.cached:
                        self._runner.admit(row.request)
                self._beats += 1
                handle = self._runner.launch(plan)
            except NotLaunchedError as error:
                plan = dataclasses.replace(plan, rows=self._possible(plan, error))
            except Exception:
                logger.exception("launching a step has failed")
                self._recover(earlier_steps_count=True)
                return False
            else:
                if not self._in_flight:
                    self._device_since = self._clock()
                self._in_flight.append((plan, handle))
                return True
        self._scheduler.pace.keep(len(self._in_flight))
        return False

    def _possible(self, plan: Plan, error: NotLaunchedError) -> tuple[PrefillRow | DecodeRow, ...]:
        """Ends the requests that a step could not be launched for; the rows of the others."""
        planned = [row.request for row in plan.rows]
        at_fault = [request for request in planned if request in error.requests] or planned
        if isinstance(error.__cause__, GrammarError):
            self._end_at_limit(at_fault, str(error))
        else:
            logger.error("a step could not be launched", exc_info=error)
            is_public = error.is_public or isinstance(error.__cause__, HybridJaxError)
            self._fail_requests(at_fault, str(error) if is_public else None)
        return tuple(row for row in plan.rows if row.request not in at_fault)

    def _read_oldest(self) -> None:
        plan, handle = self._in_flight.popleft()
        self._beats += 1
        try:
            result = self._runner.read(handle)
        except Exception:
            logger.exception("a step has failed")
            self._recover(earlier_steps_count=False)
            return
        now = self._clock()
        self._scheduler.pace.took(now - self._device_since)
        self._device_since = now
        self._apply(plan, result)

    def _apply(self, plan: Plan, result: StepResult) -> None:
        """Hands each row's tokens to its request; rows of requests that have ended are dropped."""
        for column, row in enumerate(plan.rows):
            entry = self._live.find(row.request)
            if entry is None or not self._scheduler.is_current(row):
                continue
            try:
                self._scheduler.confirm(row)
                steps = int(row.is_last) if isinstance(row, PrefillRow) else row.steps
                known, event = len(row.forced), None
                if column in result.prompt_scores:
                    entry.processor.push_prompt(result.prompt_scores[column])
                if known < steps:
                    event = entry.processor.push(result, column, steps, known)
            except GrammarError as error:
                self._end_at_limit([row.request], str(error))
                continue
            except Exception as error:
                logger.exception("request %s has failed", row.request.request_id)
                self._pools_suspect |= isinstance(error, PoolError)
                told = isinstance(error, HybridJaxError) and not isinstance(error, PoolError)
                self._end(entry, "error", error=str(error) if told else "internal error")
                continue
            if event is not None and event.finish_reason is not None:
                self._end(entry, event.finish_reason, event)
            elif event is not None:
                self._live.tell(entry, event)

    def _end_at_limit(self, requests: Sequence[Request], problem: str) -> None:
        """Ends requests whose grammars go beyond a limit."""
        for request in requests:
            entry = self._live.find(request)
            if entry is not None:
                logger.warning("request %s was ended: %s", request.request_id, problem)
                event = entry.processor.end("error", problem)
                self._end(entry, "error", dataclasses.replace(event, is_requests_fault=True))

    def _end(
        self, entry: Entry, reason: FinishReason, event: RequestOutput | None = None, error: str | None = None
    ) -> None:
        """Frees what a request holds and emits its last event; nothing if it has ended before."""
        if not self._live.take(entry):
            return
        if event is None:
            try:
                event = entry.processor.end(reason, error)
            except Exception:
                logger.exception("request %s has failed at its end", entry.request.request_id)
                reason, event = "error", entry.processor.end("error", "internal error")
        try:
            self._scheduler.finish(entry.request, reason)
        except Exception:
            logger.exception("freeing request %s has failed", entry.request.request_id)
            self._pools_suspect = True
        self._live.tell_last(entry, event)

    def _fail_requests(self, requests: Sequence[Request], problem: str | None = None) -> None:
        """Ends requests because of a step; ``problem`` may be told to clients."""
        for request in requests:
            entry = self._live.find(request)
            if entry is not None:
                self._end(entry, "error", error=problem or _STEP_FAILED)

    def _recover(self, *, earlier_steps_count: bool) -> None:
        """After a failed step: ends every admitted request, as its state may be lost, and starts anew.

        Args:
          earlier_steps_count: what is in flight was launched before the failure, so its results are
            good until one of them fails too.

        Raises:
          EngineDeadError: the runner cannot go on.
        """
        usable = earlier_steps_count
        while self._in_flight:
            plan, handle = self._in_flight.popleft()
            try:
                result = self._runner.read(handle)
            except Exception:
                logger.exception("a step in flight beside a failed one has failed too")
                usable = False
                continue
            if usable:
                self._apply(plan, result)
        self._reset_pools(self._scheduler.holding)
        self._scheduler.pace.forget_steps()
        if not self._runner.recover():
            raise EngineDeadError("the runner cannot go on after a failed step")

    def _check_when_idle(self) -> None:
        """Looks whether the pools are whole, for at most one hundredth of the time."""
        start = time.monotonic()
        if start < self._next_check:
            return
        try:
            self._scheduler.check_integrity()
        except Exception:
            logger.exception("the idle pools are not whole")
            self._pools_suspect = True
        end = time.monotonic()
        self._next_check = end + 100 * (end - start)

    def _reset_pools(self, requests: Sequence[Request]) -> None:
        """Goes on with fresh pools after they have contradicted themselves; these requests end."""
        self._fail_requests(requests)
        self._scheduler.rebuild_pools()
        self._pools_suspect = False

    def _end_all(self) -> None:
        """The thread's last act. Whatever fails in it, every request and every call has its end."""
        with self._condition:
            self._ended = True
            self._inbox, self._aborts = [], []
        for entry in self._live.all():
            try:
                if self._failed:
                    self._end(entry, "error", error="the engine has failed")
                else:
                    self._end(entry, "abort")
            except BaseException:
                logger.exception("ending request %s has failed", entry.request.request_id)
        self._in_flight.clear()
        try:
            self._last_stats = self._scheduler.stats()
            self._scheduler.flush_cache()
        except Exception:
            logger.exception("the pools are not whole at the end")
        self._calls.run()
        try:
            self._runner.close()
        except Exception:
            logger.exception("closing the runner has failed")
