"""The snapshot that a server shows of a running engine."""

import dataclasses
import threading

from serving_fakes import FakeRunner, Recorder, prompt_of, serving

from hybridjax.serving import SamplingParams
from hybridjax.serving.api import EngineStats

IDLE = EngineStats(total_pages=39, total_slots=8)


def test_stats_follow_the_requests():
    entered, release = threading.Event(), threading.Event()
    runner = FakeRunner()

    def hold(plan):
        entered.set()
        assert release.wait(60)

    runner.on_launch = hold
    recorder = Recorder()
    with serving(runner, max_running_requests=1) as (engine, _):
        assert engine.stats == IDLE
        for name in "abc":
            engine.submit(prompt_of(100), SamplingParams(max_tokens=29), recorder, request_id=name)
        assert entered.wait(60)
        # The first is held in its launch; the others wait, wherever they have got to.
        assert engine.stats.waiting == 3
        engine.abort("c")
        release.set()
        recorder.wait(3)
        engine.check_integrity()
        assert engine.stats == IDLE


def test_stats_count_what_running_requests_hold():
    seen = []
    runner = FakeRunner()
    with serving(runner, max_running_requests=1) as (engine, _):
        # A prompt of 100 tokens takes two pages of 64, and 28 more tokens fit into them.
        runner.on_read = lambda plan: seen.append(engine.stats)
        engine.generate([prompt_of(100)] * 2, SamplingParams(max_tokens=29, ignore_eos=True))
    busy = dataclasses.replace(IDLE, running=1, used_pages=2, used_slots=1)
    assert seen[0] == dataclasses.replace(busy, waiting=seen[0].waiting)
    assert seen[-1] == busy
