import math

import pytest

from hybridjax.benchmarking.load import Outcome, _TokenClock
from hybridjax.benchmarking.report import dumps, measure, table
from hybridjax.benchmarking.statistics import (
    Latencies,
    arrival_times,
    meets,
    parse_goodput,
    parse_percentiles,
    spread,
    summarize,
)
from hybridjax.errors import ConfigError


def test_percentiles_interpolate_between_neighbours():
    summary = summarize([i / 1000 for i in range(101)])
    deviation = (sum((i - 50) ** 2 for i in range(101)) / 101) ** 0.5
    expected = {"mean": 50, "std": deviation, "median": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert summary == pytest.approx(expected)
    assert summarize([0.0, 0.001], (50, 99.9)) == pytest.approx(
        {"mean": 0.5, "std": 0.5, "median": 0.5, "p50": 0.5, "p99.9": 0.999, "max": 1}
    )
    assert summarize([0.001, 0.002])["p90"] == pytest.approx(1.9)
    names = ("mean", "median", "p90", "p95", "p99", "max")
    assert summarize([0.003]) == pytest.approx({"std": 0} | dict.fromkeys(names, 3))
    assert summarize([]) is None


def test_percentiles_are_read_from_a_list():
    assert parse_percentiles("99,50,99.9,50") == (50, 99, 99.9)
    for text in ("", "x", "50,", "-1", "101", "nan"):
        with pytest.raises(ConfigError, match="metric_percentiles"):
            parse_percentiles(text)


def test_spread_gives_quartiles_and_count():
    assert spread([5, 1, 2, 3, 4]) == {"median": 3, "q1": 2, "q3": 4, "min": 1, "max": 5, "n": 5}


def test_goodput_is_parsed():
    assert parse_goodput(["ttft:500", "tpot:50.5", "e2el:2000"]) == {"ttft": 500, "tpot": 50.5, "e2e": 2000}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize("pair", ["ttft", "speed:5", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "e2e:inf"])
def test_goodput_refuses_what_is_no_limit(pair):
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([pair])


def test_goodput_refuses_two_limits_of_one_kind():
    with pytest.raises(ConfigError, match="e2e twice"):
        parse_goodput(["e2e:1", "e2el:2"])


def test_a_request_is_good_if_it_keeps_every_limit():
    latencies = Latencies(ttft=0.1, tpot=0.02, itl=(0.01, 0.03), e2e=0.14)
    assert meets(latencies, {})
    assert meets(latencies, {"ttft": 100.1, "tpot": 20.1, "itl": 30.1, "e2e": 140.1})
    for name, limit in {"ttft": 99.9, "tpot": 19.9, "itl": 29.9, "e2e": 139.9}.items():
        assert not meets(latencies, {name: limit})
    assert meets(Latencies(0.1, None, (), 0.1), {"tpot": 1, "itl": 1})


def test_arrivals_are_a_seeded_poisson_process():
    times = arrival_times(4001, 20.0, seed=7)
    assert times == arrival_times(4001, 20.0, seed=7)
    assert times != arrival_times(4001, 20.0, seed=8)
    gaps = [b - a for a, b in zip(times, times[1:])]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0 and min(gaps) > 0
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # An exponential distribution's deviation is its mean; that of evenly spaced arrivals is 0.
    assert math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) == pytest.approx(mean, rel=0.05)


def test_arrivals_at_an_infinite_rate_are_all_at_once():
    assert arrival_times(3, math.inf, seed=0) == [0, 0, 0]
    assert arrival_times(0, 1.0, seed=0) == []
    for rate in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="request_rate"):
            arrival_times(1, rate, seed=0)


def test_the_tokens_of_a_chunk_share_its_gap():
    clock = _TokenClock(10.0)
    for now, tokens in [(10.5, 2), (10.6, 0), (11.5, 2), (11.75, 1)]:
        clock.arrived(now, tokens)
    clock.finished(11.75)
    latencies = clock.latencies(5, elapsed=2.0)
    assert latencies == Latencies(ttft=0.5, tpot=1.25 / 4, itl=(0, 0.5, 0.5, 0.25), e2e=2.0)
    assert sum(latencies.itl) == pytest.approx(latencies.tpot * 4)


def test_tokens_without_text_show_when_the_stream_ends():
    clock = _TokenClock(1.0)
    clock.finished(1.5)
    assert clock.latencies(1, elapsed=0.6) == Latencies(0.5, None, (), 0.6)
    assert clock.latencies(0, elapsed=0.6) == Latencies(None, None, (), 0.6)


def outcome(e2e, error=None, **fields):
    itl = (0.1,) * 3
    return Outcome(latencies=Latencies(e2e - 0.3, 0.1, itl, e2e), error=error, counted_by="usage", **fields)


def test_the_numbers_of_a_run():
    outcomes = [outcome(1.0, input_len=10, output_len=4, itl_per_token=True) for _ in range(2)]
    outcomes.append(outcome(2.0, input_len=20, output_len=4, itl_per_token=True))
    outcomes.append(outcome(9.0, error="boom", input_len=99, output_len=99))
    numbers = measure(outcomes, duration=4.0, goodput={"e2e": 1500})
    assert (numbers["successful"], numbers["failed"], numbers["errors"]) == (3, 1, {"boom": 1})
    assert (numbers["input_tokens"], numbers["output_tokens"]) == (40, 12)
    assert (numbers["request_throughput"], numbers["output_throughput"]) == (0.75, 3)
    assert numbers["total_throughput"] == 13
    assert numbers["concurrency"] == 1
    assert numbers["e2e_ms"]["max"] == pytest.approx(2000)
    assert (numbers["goodput_share"], numbers["goodput_throughput"]) == (0.5, 0.5)
    assert numbers["itl_unit"] == "token"
    shown = table(numbers)
    assert "error (1 x): boom" in shown and "Good requests (%)" in shown


def test_a_run_without_success_has_no_latencies():
    numbers = measure([outcome(1.0, error=f"e{i}") for i in range(12)], duration=1.0, goodput={"ttft": 1})
    assert (numbers["successful"], numbers["failed"], numbers["goodput_share"]) == (0, 12, 0)
    assert numbers["ttft_ms"] is numbers["e2e_ms"] is None
    shown = table(numbers)
    assert "n/a" in shown and "and 2 other errors" in shown


def test_infinite_settings_are_words_in_json():
    assert dumps({"rate": math.inf, "in": {"x": -math.inf}}) == '{"rate": "inf", "in": {"x": "-inf"}}'
