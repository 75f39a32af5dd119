import codecs

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from serving_fakes import FakeText, FakeTokenizer

from hybridjax.errors import HybridJaxError
from hybridjax.serving.api import RequestOutput, SamplingParams
from hybridjax.serving.output import OutputProcessor, StopMatcher
from hybridjax.serving.plan import StepResult
from hybridjax.serving.request import Limits, make_request

ALPHABET = ["", "a", "b", "ab", "ba", "aab", "c", "<eos>"]
EOS = 7
LIMITS = Limits(context_length=1000, vocab_size=len(ALPHABET), eos_tokens=(EOS,))
ids = {text: i for i, text in enumerate(ALPHABET)}


def processor(*, text: bool = True, delay: int = 0, **params) -> OutputProcessor:
    request = make_request("r", [1, 2], SamplingParams(**({"max_tokens": 100} | params)), LIMITS, seed=0)
    source = FakeText(FakeTokenizer(ALPHABET), delay=delay) if text else None
    return OutputProcessor(request, source)


def result_of(tokens: list[int], **changes) -> StepResult:
    column = np.array(tokens, np.int32)[:, None]
    return StepResult(**({"tokens": column, "logprobs": -column.astype(np.float32)} | changes))


def feed(proc: OutputProcessor, tokens: list[int], cuts: list[int] | None = None) -> list[RequestOutput]:
    """Pushes tokens in pieces until the request ends, as the engine does."""
    events: list[RequestOutput] = []
    borders = [0, *(cuts or range(1, len(tokens))), len(tokens)]
    for start, end in zip(borders, borders[1:]):
        if end > start:
            events.append(proc.push(result_of(tokens[start:end]), 0, end - start))
            if events[-1].finish_reason is not None:
                break
    return events


def text_of(events: list[RequestOutput]) -> str:
    return "".join(event.text for event in events)


def tokens_of(events: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


def expected_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """The definition: the match with the smallest end, of those the longest."""
    found = [(end, end - len(s), s) for s in stops for end in range(len(s), len(text) + 1)]
    found = [(end, start, s) for end, start, s in found if text[start:end] == s]
    return (min(found)[1], min(found)[0], min(found)[2]) if found else None


@settings(max_examples=300)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 40), max_size=10),
    st.booleans(),
)
@example("aabaabaab", ["aabaabb", "baabaa"], [], False)
def test_matcher_equals_its_definition_however_the_text_is_cut(text, stops, cuts, include):
    matcher = StopMatcher(stops, include_match=include)
    borders = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    shown, found = "", None
    for start, end in zip(borders, borders[1:]):
        piece, found = matcher.push(text[start:end])
        shown += piece
        if found is not None:
            break
        seen = text[:end]
        # Exactly the longest suffix that could begin a stop string is held back.
        held = max((n for s in stops for n in range(len(s)) if n and seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - held]
    expected = expected_match(text, stops)
    if expected is None:
        assert found is None
        assert shown + matcher.flush() == text
    else:
        start, end, stop = expected
        assert found == stop
        assert shown == text[: end if include else start]


def test_matcher_lets_strings_pass_while_not_armed():
    matcher = StopMatcher(["aba"])
    assert matcher.push("aba", armed=False) == ("ab", None)
    assert matcher.push("b") == ("", None)
    assert matcher.push("a") == ("", "aba"), "an overlapping later match counts"


def test_matcher_stays_fast_on_repetitive_text():
    matcher = StopMatcher(["a" * 1023 + "b"] * 16)
    for _ in range(20):
        matcher.push("a" * 500)
    shown, found = matcher.push("b")
    assert found == "a" * 1023 + "b"
    assert shown == ""


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("split", [[1], [2], [3], [1, 2, 3], []])
def test_stop_string_over_several_tokens(include, split):
    proc = processor(stop=["bab"], include_stop_str_in_output=include)
    tokens = [ids["a"], ids["ab"], ids["ab"], ids["c"]]
    events = feed(proc, tokens, split)
    assert text_of(events) == ("aabab" if include else "aa")
    assert tokens_of(events) == tuple(tokens[:3]), "the tokens of the match are there, later ones are not"
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "bab")
    assert events[-1].completion_tokens == 3


def test_text_that_could_begin_a_stop_string_is_held_back():
    proc = processor(stop=["abc"])
    texts = [event.text for event in feed(proc, [ids[t] for t in ("a", "b", "a", "b", "b", "a")])]
    assert texts == ["", "", "ab", "", "abb", ""]
    assert proc.end("abort").text == "a"


@pytest.mark.parametrize("reason", ["abort", "timeout"])
def test_an_early_end_shows_what_the_detokenizer_held(reason):
    proc = processor(delay=1, stop=["abc"])
    # "a" may begin the stop string, "b" is what the detokenizer is not sure of.
    assert text_of(feed(proc, [ids["c"], ids["a"], ids["b"]])) == "c"
    event = proc.end(reason)
    assert (event.text, event.finish_reason, event.token_ids) == ("ab", reason, ())
    # What the client never wants to see does not come out this way either.
    proc = processor(delay=1, stop=["ab"])
    feed(proc, [ids["c"], ids["a"], ids["b"]])
    assert proc.end(reason).text == ""
    proc = processor(delay=1, stop=["ab"], include_stop_str_in_output=True)
    feed(proc, [ids["c"], ids["a"], ids["b"]])
    assert proc.end(reason).text == "ab"
    proc = processor(delay=1, stop=["b"], min_tokens=5)
    feed(proc, [ids["a"], ids["b"]])
    assert proc.end(reason).text == "b", "not a stop string yet"


def test_an_early_end_shows_the_bytes_of_an_unfinished_character_as_any_end_does():
    class Utf8:
        """Token i is byte i."""

        def __init__(self):
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def push(self, ids, /):
            return self._decoder.decode(bytes(ids))

        def flush(self):
            return self._decoder.decode(b"", final=True)

    tokens = [*"né".encode(), *"€".encode()[:2]]
    texts = []
    for end in ("abort", "timeout", "length"):
        count = len(tokens) if end == "length" else 100
        limits = Limits(context_length=1000, vocab_size=256)
        request = make_request("r", [1], SamplingParams(max_tokens=count), limits, seed=0)
        proc = OutputProcessor(request, Utf8())
        events = feed(proc, tokens)
        if end != "length":
            events.append(proc.end(end))
        texts.append(text_of(events))
    assert texts == ["né\ufffd"] * 3


def test_the_match_that_ends_first_wins_and_of_those_the_longest():
    events = feed(processor(stop=["aabc", "ab"]), [ids["aab"], ids["c"]])
    assert (text_of(events), events[-1].stop_reason) == ("a", "ab")
    events = feed(processor(stop=["b", "ab"]), [ids["aab"]])
    assert (text_of(events), events[-1].stop_reason) == ("a", "ab")


def test_model_end_token():
    events = feed(processor(), [ids["a"], EOS, ids["b"]], [3])
    assert tokens_of(events) == (ids["a"], EOS)
    assert text_of(events) == "a"
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", None)
    assert (events[-1].prompt_tokens, events[-1].completion_tokens) == (2, 2)


def test_stop_token_ids_report_which():
    events = feed(processor(stop_token_ids=[ids["c"]]), [ids["a"], ids["c"]])
    assert (text_of(events), events[-1].stop_reason) == ("a", ids["c"])
    events = feed(processor(stop_token_ids=[ids["c"]], include_stop_str_in_output=True), [ids["a"], ids["c"]])
    assert (text_of(events), events[-1].stop_reason) == ("ac", ids["c"])
    events = feed(processor(stop_token_ids=[EOS], ignore_eos=True), [EOS])
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", EOS)


def test_ignore_eos():
    events = feed(processor(ignore_eos=True, max_tokens=3), [EOS, EOS, EOS])
    assert [event.finish_reason for event in events] == [None, None, "length"]


def test_max_tokens():
    events = feed(processor(max_tokens=3), [ids["a"]] * 5, [2])
    assert tokens_of(events) == (ids["a"],) * 3
    assert [event.finish_reason for event in events] == [None, "length"]
    assert text_of(events) == "aaa"
    events = feed(processor(max_tokens=2), [ids["a"], EOS])
    assert events[-1].finish_reason == "stop"


def test_held_text_comes_out_at_the_end():
    events = feed(processor(max_tokens=2, stop=["abc"]), [ids["a"], ids["b"]])
    assert [event.text for event in events] == ["", "ab"]
    events = feed(processor(stop=["abc"]), [ids["ab"], EOS])
    assert text_of(events) == "ab"
    events = feed(processor(max_tokens=2, delay=1), [ids["a"], ids["b"]])
    assert [event.text for event in events] == ["", "ab"], "what the detokenizer held back, too"


def test_text_that_only_the_last_flush_reveals_can_still_match():
    events = feed(processor(max_tokens=2, delay=1, stop=["ab"]), [ids["a"], ids["b"]])
    assert text_of(events) == ""
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "ab")
    events = feed(processor(delay=1, stop=["b"]), [ids["a"], ids["b"], EOS])
    assert text_of(events) == "a"
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "b")


def test_min_tokens_lets_stop_tokens_and_strings_pass():
    tokens = [ids["a"], EOS, ids["b"], EOS]
    events = feed(processor(min_tokens=2), tokens)
    assert tokens_of(events) == tuple(tokens)
    assert text_of(events) == "a<eos>b"
    events = feed(processor(min_tokens=2, stop=["a"]), [ids["a"], ids["a"], ids["a"], ids["a"]])
    assert len(tokens_of(events)) == 3
    assert text_of(events) == "aa"


def test_logprobs():
    assert feed(processor(), [1, 2])[0].logprobs is None
    proc = processor(logprobs=0)
    events = feed(proc, [1, 2])
    assert [(item.token_id, item.logprob, item.top) for event in events for item in event.logprobs or ()] == [
        (1, -1.0, ()),
        (2, -2.0, ()),
    ]
    top_ids = np.full((3, 1, 20), -1, np.int32)
    top_ids[:, 0, :3] = [[4, 5, 6], [1, 2, 3], [7, 8, 9]]
    top_logprobs = np.where(top_ids < 0, -np.inf, -top_ids).astype(np.float32)
    result = result_of([1, EOS, 2], top_ids=top_ids, top_logprobs=top_logprobs)
    event = processor(logprobs=2).push(result, 0, 3)
    assert event.logprobs is not None and len(event.logprobs) == 2, "none after the stop token"
    assert event.logprobs[1].top == ((1, -1.0), (2, -2.0))
    event = processor(logprobs=20).push(result, 0, 3)
    assert event.logprobs is not None
    assert event.logprobs[0].top == ((4, -4.0), (5, -5.0), (6, -6.0)), "a small vocabulary has fewer"


def test_without_a_tokenizer_there_is_no_text():
    events = feed(processor(text=False, max_tokens=3), [1, 2, 3])
    assert text_of(events) == ""
    assert events[-1].finish_reason == "length"
    assert feed(processor(text=False), [1, EOS])[-1].finish_reason == "stop"


def test_steps_bound_what_is_read_of_a_column():
    event = processor().push(result_of([1, 2, -1, -1]), 0, 2)
    assert event.token_ids == (1, 2)
    result = StepResult(np.array([[1, 4], [2, 5]], np.int32), np.zeros((2, 2), np.float32))
    assert processor().push(result, 1, 2).token_ids == (4, 5)


def test_inconsistent_or_unfinite_results_are_errors():
    with pytest.raises(HybridJaxError, match="left the request"):
        processor().push(result_of([1, -1]), 0, 2)
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(HybridJaxError, match="not finite"):
            processor().push(result_of([1], logprobs=np.array([[value]], np.float32)), 0, 1)


def test_last_events_of_abort_and_error():
    proc = processor(logprobs=1)
    feed(proc, [1, 2])
    event = proc.end("error", "why")
    assert (event.finish_reason, event.error, event.completion_tokens) == ("error", "why", 2)
    assert (event.token_ids, event.text, event.logprobs) == ((), "", ())
    assert processor().end("abort").error is None


pieces = st.lists(st.sampled_from(range(1, len(ALPHABET))), min_size=1, max_size=30)


@settings(max_examples=150)
@given(
    pieces,
    st.lists(st.integers(0, 30), max_size=8).map(sorted),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 30),
    st.sampled_from([0, 2, 3]),
    st.booleans(),
)
def test_events_do_not_depend_on_how_tokens_arrive(tokens, cuts, stops, max_tokens, delay, include):
    settings_ = {
        "stop": stops,
        "max_tokens": max_tokens,
        "delay": delay,
        "include_stop_str_in_output": include,
    }
    one_by_one = feed(processor(**settings_), tokens)
    cut = feed(processor(**settings_), tokens, [cut for cut in cuts if cut <= len(tokens)])
    assert text_of(cut) == text_of(one_by_one)
    assert tokens_of(cut) == tokens_of(one_by_one)
    for name in ("finish_reason", "stop_reason", "completion_tokens"):
        assert getattr(cut[-1], name) == getattr(one_by_one[-1], name)
    # Without a delay the first token that completes a stop string is the last one.
    if not delay and EOS not in tokens:
        text = "".join(ALPHABET[token] for token in tokens[:max_tokens])
        match = expected_match(text, stops)
        if match is not None:
            assert text_of(cut) == text[: match[1] if include else match[0]]
