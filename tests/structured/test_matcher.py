"""A request's matcher: end tokens, errors, and threads."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest
from grammar_walks import EOS, allowed, byte_tokens

from hybridjax.errors import GrammarError, HybridJaxError
from hybridjax.structured.matcher import EndTokens, Matcher

A, B = 69, 70  # of tiny-sala


@pytest.fixture(autouse=True)
def letters(tokenizer):
    assert byte_tokens(tokenizer)[ord("a")] == A and byte_tokens(tokenizer)[ord("b")] == B


def test_it_is_complete_when_nothing_can_follow_and_is_never_advanced_after_it(compiler):
    matcher = compiler.matcher("regex", "a[bc]")
    assert not matcher.is_complete
    matcher.accept(A)
    assert not matcher.is_complete and B in allowed(matcher)
    matcher.accept(B)
    assert matcher.is_complete
    for token in (A, 2):
        with pytest.raises(HybridJaxError, match="after the grammar's end"):
            matcher.accept(token)
    assert matcher.is_complete


def test_a_token_that_does_not_fit_breaks_only_this_matcher(compiler):
    broken, other = (compiler.matcher("regex", "[ab]{3}") for _ in range(2))
    with pytest.raises(HybridJaxError, match="does not fit"):
        broken.accept(500)
    with pytest.raises(HybridJaxError):
        broken.accept(A)
    for token in (A, B, A):
        assert token in allowed(other)
        other.accept(token)
    assert other.is_complete


def test_end_tokens_are_allowed_where_the_grammar_may_end(compiler):
    matcher = compiler.matcher("regex", "ab*")
    assert not set(EOS) & set(allowed(matcher))
    matcher.accept(A)
    assert set(EOS) < set(allowed(matcher)) and B in allowed(matcher)


def test_own_stop_tokens_are_allowed_there_too(compiler):
    matcher = compiler.matcher("regex", "ab*", stop_tokens=[999, B])
    matcher.accept(A)
    assert {999, B, *EOS} <= set(allowed(matcher))


def test_ignore_eos_ends_only_where_nothing_else_is_possible(compiler):
    matcher = compiler.matcher("regex", "ab*", ignore_eos=True)
    matcher.accept(A)
    assert B in allowed(matcher) and not set(EOS) & set(allowed(matcher))
    empty = compiler.matcher("lark", 'start: ""', ignore_eos=True)
    assert allowed(empty) == sorted(EOS)


def test_min_tokens_gives_way_to_the_grammars_end(compiler):
    matcher = compiler.matcher("regex", "ab*", min_tokens=3, stop_tokens=[999])
    for token in (A, B):
        assert not {999, *EOS} & set(allowed(matcher))
        matcher.accept(token)
    assert not {999, *EOS} & set(allowed(matcher))
    matcher.accept(B)
    assert {999, *EOS} < set(allowed(matcher))
    short = compiler.matcher("lark", 'start: ""', min_tokens=9)
    assert allowed(short) == sorted(EOS)


def test_stop_tokens_within_the_text_wait_for_min_tokens(compiler):
    matcher = compiler.matcher("regex", "[ab]{4}", min_tokens=2, stop_tokens=[B])
    assert B not in allowed(matcher) and A in allowed(matcher)
    only = compiler.matcher("regex", "b[ab]", min_tokens=2, stop_tokens=[B])
    assert B in allowed(only)


class FakeState:
    """An llguidance matcher of which everything can be told."""

    def __init__(self):
        self.error = ""
        self.go = threading.Event()
        self.inside = threading.Semaphore(1)
        self.overlapped = False
        self.refused = {13}
        self.work = 0.0

    def _alone(self, call):
        self.overlapped |= not self.inside.acquire(blocking=False)
        try:
            return call()
        finally:
            self.inside.release()

    def consume_token(self, token):
        until = time.thread_time() + self.work
        while time.thread_time() < until:
            pass
        return self._alone(lambda: token not in self.refused)

    def is_stopped(self):
        return False

    def is_error(self):
        return bool(self.error)

    def get_error(self):
        return self.error

    def is_accepting(self):
        return False

    def compute_bitmask(self):
        return self._alone(lambda: (self.go.wait(30), b"\x06\0\0\0")[1])


def fake_matcher(pool, accept_seconds=0.05):
    state = FakeState()
    return state, Matcher(state, b"\x06", False, 40, EndTokens((0,)), pool, accept_seconds)


def test_masks_are_computed_in_a_worker_and_waited_for():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        state, matcher = fake_matcher(pool)
        assert matcher.ready and allowed(matcher) == [1, 2]
        matcher.accept(1)  # returns although its mask takes long
        assert not matcher.ready
        waiting = threading.Thread(target=matcher.accept, args=(2,))
        waiting.start()
        state.go.set()
        waiting.join(30)
        assert allowed(matcher) == [1, 2] and matcher.mask().dtype == np.uint32
        assert not state.overlapped


def test_a_mask_that_fails_is_an_error_of_the_request():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        state, matcher = fake_matcher(pool)
        state.go.set()
        state.error = "too many items\n<state> a secret"
        matcher.accept(1)
        for _ in range(2):
            with pytest.raises(GrammarError, match="beyond a limit .* too many items") as error:
                matcher.mask()
            assert "secret" not in str(error.value)
        with pytest.raises(HybridJaxError):
            matcher.accept(1)
        _, rejected = fake_matcher(pool)
        with pytest.raises(HybridJaxError, match="does not fit"):
            rejected.accept(13)


def test_a_token_that_the_mask_allows_is_refused_for_a_limit_only():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        state, matcher = fake_matcher(pool)
        state.refused, state.error = {1, 3}, "Current row has 2034 items; max is 2000\n<state> a secret"
        with pytest.raises(GrammarError, match="beyond a limit .* 2034 items; max is 2000$"):
            matcher.accept(1)
        _, matcher = fake_matcher(pool)
        matcher._state.refused = {3}
        with pytest.raises(HybridJaxError, match="token 3 does not fit") as error:
            matcher.accept(3)
        assert not isinstance(error.value, GrammarError)


def test_taking_tokens_may_hold_others_up_for_so_long_only():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        state, matcher = fake_matcher(pool, accept_seconds=0.01)
        state.go.set()
        for _ in range(50):
            matcher.accept(1)  # quick ones do not add up
        state.work = 0.005
        with pytest.raises(GrammarError, match="too much time"):
            for _ in range(10):
                matcher.accept(1)


def test_a_mask_that_never_comes_is_an_error_too():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        state, matcher = fake_matcher(pool)
        blocker = pool.submit(state.go.wait, 30)
        matcher.accept(1)
        pool.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(HybridJaxError, match="in time"):
            matcher.mask()
        state.go.set()
        blocker.result()


def test_masks_without_any_token_are_errors():
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(HybridJaxError, match="no token"):
        Matcher(FakeState(), b"\0", False, 40, EndTokens((0,)), pool)
