import json

import pytest
from benchmarking_fakes import FakeEngine

from hybridjax import bench_latency, bench_throughput
from hybridjax.benchmarking import offline
from hybridjax.benchmarking.datasets import Item

WORKLOAD = ["--dataset-name", "random-ids", "--num-prompts", "6", "--random-input-len", "20"]
WORKLOAD += ["--random-output-len", "8", "--num-iters", "2"]
BATCH = ["--batch-size", "3", "--input-len", "10", "--output-len", "4", "--num-iters", "2"]


@pytest.fixture
def use(monkeypatch):
    """Puts a fake engine in the place of the real one."""

    def put(engine):
        engine.from_config = lambda config: engine
        monkeypatch.setattr("hybridjax.serving.Engine", engine, raising=False)
        return engine

    return put


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_latency_of_the_bundled_model(capsys):
    status = bench_latency.main(
        "--context-length 256 --max-running-requests 2 --skip-server-warmup --batch-size 2 --input-len 70"
        " --output-len 6 --num-iters 2 --compilation-cache-dir".split()
        + [""]
    )
    record = last_line(capsys)
    assert status == 0
    assert (record["checked"], record["differing"]) == (2, 0)
    assert record["platform"] == "cpu" and record["jax"] and record["settings"]["input_len"] == 70
    for name in ("first_token_ms", "latency_ms", "total_tokens_per_s"):
        assert record[name]["n"] == 2 and record[name]["median"] > 0


def test_throughput_counts_the_tokens_of_the_results(use, capsys):
    engine = use(FakeEngine())
    assert bench_throughput.main([*WORKLOAD, "--random-range-ratio", "1"]) == 0
    record = last_line(capsys)
    assert record["input_tokens"]["median"] == 120 and record["output_tokens"]["median"] == 48
    assert record["requests_per_s"]["n"] == 2
    assert (record["checked"], record["differing"], record["skipped"]) == (4, 0, {})
    # The check: a batch of 4 and each alone. Then one warm-up and two measured runs with new prompts.
    assert [len(prompts) for prompts, _ in engine.batches] == [4, 1, 1, 1, 1, 6, 6, 6]
    runs = [prompts for prompts, _ in engine.batches[-3:]]
    assert runs[0] != runs[1] != runs[2] != runs[0]


def test_each_latency_iteration_has_new_prompts(use, capsys):
    engine = use(FakeEngine())
    assert bench_latency.main([*BATCH, "--warmup-iters", "0"]) == 0
    assert last_line(capsys)["per_output_token_ms"]["n"] == 2
    timed = engine.batches[-4:]
    assert [params[0].max_tokens for _, params in timed] == [1, 4, 1, 4]
    assert len({prompts[0] for prompts, _ in timed}) == 4


@pytest.mark.parametrize(("main", "flags"), [(bench_latency.main, BATCH), (bench_throughput.main, WORKLOAD)])
def test_no_speed_is_shown_if_tokens_depend_on_the_batch(use, capsys, main, flags):
    use(FakeEngine(moody=True))
    assert main(flags) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the check failed; no speeds are shown"
    assert not any(word in line for line in lines for word in ("_ms", "per_s"))


def test_on_an_accelerator_differences_are_reported_beside_the_speeds(use, capsys, monkeypatch):
    use(FakeEngine(moody=True))
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert bench_latency.main(BATCH) == 0
    assert last_line(capsys)["differing"] == 3


def test_requests_beyond_the_context_are_left_out_and_counted(use, capsys, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": [1] * length, "output_len": 4} for length in (60, 61, 5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    engine = use(FakeEngine())
    flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-iters", "1"]
    assert bench_throughput.main(flags) == 0
    assert last_line(capsys)["skipped"] == {"beyond_context": 1}
    assert [len(prompt) for prompt in engine.batches[-1][0]] == [60, 5]
    file.write_text(json.dumps(rows[1]))
    assert bench_throughput.main(flags) == 2
    assert "no request fits" in capsys.readouterr().err


def test_the_check_spreads_over_the_batch():
    engine = FakeEngine()
    engine.info.max_running_requests = 20
    items = [Item((i,), 1, 30) for i in range(40)]
    assert offline.count_differing(engine, items) == (0, 7)
    together, *alone = engine.batches
    assert len(together[0]) == 20 and [prompts[0][0] for prompts, _ in alone] == list(range(0, 20, 3))
    assert {p.max_tokens for p in together[1]} == {24}


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (bench_latency.main, ["--batch-size", "5"], "max_running_requests"),
        (bench_latency.main, ["--num-iters", "0"], "num_iters"),
        (bench_throughput.main, ["--num-prompts", "0"], "num_prompts"),
        (bench_throughput.main, ["--output-file", "/nonexistent/x"], "output_file"),
        (bench_throughput.main, ["--dataset-name", "sharegpt"], "dataset-path"),
    ],
)
def test_settings_that_cannot_work_give_2(use, capsys, main, flags, message):
    use(FakeEngine())
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_request_that_ends_early_is_an_error(use, capsys, monkeypatch):
    engine = use(FakeEngine())
    generate = engine.generate

    def cut(prompts, params):
        results = generate(prompts, params)
        results[-1].finish_reason = "error"
        return results

    monkeypatch.setattr(engine, "generate", cut)
    assert bench_latency.main(BATCH) == 1
    assert "ended early" in capsys.readouterr().err
