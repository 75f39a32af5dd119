import numpy as np
import pytest

from hybridjax.errors import RequestError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.plan import PrefillRow
from hybridjax.serving.request import Limits, Request, make_request

LIMITS = Limits(context_length=100, vocab_size=50, eos_tokens=(2, 3))


def make(prompt=(1, 2, 3), limits=LIMITS, **params) -> Request:
    return make_request("r", prompt, SamplingParams(**params), limits, seed=77)


def refused(*args, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(*args, **kwargs)
    return caught.value


def test_lengths_and_defaults():
    request = make(max_tokens=5)
    assert request.prompt_length == 3
    assert request.limit == 7, "the last token is never fed"
    assert request.pages_needed(4) == 2
    assert make(max_tokens=6).pages_needed(4) == 3
    assert request.seed == 77
    assert make(seed=-5).seed == -5
    assert make(max_tokens=None).max_tokens == 97
    assert request.min_position == 3
    assert make(min_tokens=4).min_position == 7
    assert (request.cached, request.computed, request.scheduled) == (0, 0, 0)


def test_prompt_is_a_read_only_copy():
    source = np.array([1, 2, 3], np.int64)
    request = make(source)
    source[0] = 9
    assert request.prompt_ids.tolist() == [1, 2, 3]
    assert request.prompt_ids.dtype == np.int32
    with pytest.raises(ValueError):
        request.prompt_ids[0] = 4


def test_stop_tokens():
    assert make().stop_tokens == (2, 3)
    assert make(stop_token_ids=[7, 3, 7]).stop_tokens == (2, 3, 7)
    ignoring = make(ignore_eos=True, stop_token_ids=[3])
    assert ignoring.stop_tokens == (3,)
    assert ignoring.eos_tokens == ()
    many = make(stop_token_ids=list(range(10, 30)))
    assert many.device_stop_tokens == (2, 3, 10, 11, 12, 13, 14, 15)
    assert len(many.stop_tokens) == 22


def test_context_errors_have_numbers_and_a_code():
    error = refused([1] * 100, max_tokens=None)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "100 tokens" in str(error)
    error = refused([1] * 60, max_tokens=41)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    for number in ("60", "41", "101", "100"):
        assert number in str(error)
    assert make([1] * 60, max_tokens=40).limit == 99
    assert make([1] * 99, max_tokens=None).max_tokens == 1


@pytest.mark.parametrize("prompt", [[], (), np.zeros(0, np.int32)])
def test_empty_prompt(prompt):
    error = refused(prompt)
    assert error.param == "prompt"
    assert "empty" in str(error)


@pytest.mark.parametrize(
    "prompt", [[1.5], [[1, 2]], [[1], [2, 3]], ["a"], [None], [True], 5, None, [2**70], [[]], {1: 2}]
)
def test_prompts_that_are_not_token_ids(prompt):
    assert refused(prompt).param == "prompt"


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_ids_outside_the_vocabulary(bad):
    error = refused([1, bad])
    assert str(bad) in str(error)
    assert "token 1" in str(error)


def test_settings_outside_the_vocabulary():
    assert refused(logit_bias={49: 1.0, 50: 1.0}).param == "logit_bias"
    assert refused(stop_token_ids=[50]).param == "stop_token_ids"
    assert make(logit_bias={49: 1.0}, stop_token_ids=[49]).needs_sampler_reset


def test_min_tokens_needs_every_stop_token_on_the_device():
    assert refused(stop_token_ids=list(range(10, 17)), min_tokens=1).param == "min_tokens"
    assert make(stop_token_ids=list(range(10, 16)), min_tokens=1).min_position == 4


def test_what_needs_a_sampler_reset():
    assert not make(temperature=0.5, top_k=3).needs_sampler_reset
    for params in ({"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.5}):
        assert make(**params).needs_sampler_reset
    assert not make(logprobs=0).wants_top_logprobs
    assert make(logprobs=2).wants_top_logprobs


@pytest.mark.parametrize(
    ("start", "end", "is_last"),
    [(0, 64, True), (64, 70, False), (0, 0, False), (64, 71, True), (-1, 5, False)],
)
def test_a_chunk_that_does_not_end_the_prompt_cannot_be_the_last(start, end, is_last):
    request = make([1] * 70, max_tokens=1)
    PrefillRow(request, 0, 64, False)
    PrefillRow(request, 64, 70, True)
    with pytest.raises(ValueError):
        PrefillRow(request, start, end, is_last)


def test_min_tokens_must_fit_into_what_can_be_generated():
    assert make(min_tokens=5, max_tokens=5).min_position == 8
    error = refused(min_tokens=6, max_tokens=5)
    assert (error.param, "at most max_tokens, 5 here" in str(error)) == ("min_tokens", True)
    assert refused(min_tokens=2**31 - 1, max_tokens=None).param == "min_tokens"


NUMBERS = ("temperature", "top_k", "top_p", "min_p", "min_tokens")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", [*NUMBERS, *PENALTIES])
@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), -1000])
def test_settings_that_are_no_numbers_in_range(name, value):
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("value", [None, 3, [None], [1.5], [-1], {1: "x"}, {"1": 1.0}, [""], object()])
def test_lists_that_hold_something_else(name, value):
    assert refused(**{name: value}).param == name


def test_what_may_be_left_open():
    assert make(max_tokens=None, seed=None, logprobs=None).max_tokens == 97
