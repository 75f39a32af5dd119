"""A short soak of the server; ``python -m benchmarks.soak`` is the long one."""

from types import SimpleNamespace

import pytest

from benchmarks.soak import Held, Ledger, SoakError, _check, soak

HELD = Held(files=10, threads=20, mebibytes=500.0, objects=1)


def test_clients_of_every_kind_leave_nothing_behind():
    report = soak(300)
    assert report["accepted"] > 200
    assert report["ends"]["abort"] > 20 and report["ends"]["length"] > 50
    kinds = {"whole", "stream", "malformed", "leaves_a_stream", "leaves_before_the_answer"}
    kinds |= {"runs_out_of_time", "is_held_to_a_grammar", "asks_about_its_prompt"}
    assert kinds | {"aborts_by_name", "reads_slowly", "breaks_off_its_body"} <= report["clients"].keys()


def ledger(*requests: list[str | None]) -> Ledger:
    """What is noted of requests whose events have these finish reasons."""
    engine = SimpleNamespace(submit=None)
    book = Ledger(engine)  # pyright: ignore
    for i, reasons in enumerate(requests):

        def submit(prompt, params, on_output, *, request_id, reasons=reasons):
            for reason in reasons:
                on_output(SimpleNamespace(finish_reason=reason))

        engine.submit = submit
        book.submit([1], None, lambda event: None, request_id=str(i))
    return book


def test_the_checks_pass_what_is_right():
    _check(ledger([None, "stop"], ["abort"]), HELD, HELD)


def test_a_request_that_nobody_waits_for_must_be_aborted():
    book = ledger(["abort"], [None, "length"])
    book.ends = {f"{name:0>32}-0": ends for name, ends in book.ends.items()}
    _check(book, HELD, HELD, {f"{0:0>32}"})
    with pytest.raises(SoakError, match="whose client had left"):
        _check(book, HELD, HELD, {f"{1:0>32}"})


@pytest.mark.parametrize(
    ("requests", "changes", "message"),
    [
        ([], {}, "nothing was accepted"),
        ([[None]], {}, "without exactly one last event"),
        ([["stop"], []], {}, "without exactly one last event"),
        ([["stop", "abort"]], {}, "events after the last one"),
        ([["stop", None]], {}, "events after the last one"),
        ([["error"]], {}, "requests ended by"),
        ([["stop"]], {"files": 11}, "1 files stayed open"),
        ([["stop"]], {"threads": 61}, "61 threads"),
        ([["stop"]], {"objects": 50}, "50 objects"),
        ([["stop"]], {"mebibytes": 600.0}, "600.0 MiB"),
    ],
)
def test_the_checks_find_what_is_wrong(requests, changes, message):
    after = Held(**(vars(HELD) | changes))
    with pytest.raises(SoakError, match=message):
        _check(ledger(*requests), HELD, after)
