import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridjax.text.reasoning import MAX_SPACE, ReasoningSplitter, Split, is_open

PIECES = ["<think>", "</think>", "<thi", "</", "<", "\n", " ", "a", "b\n\n", "Grüße"]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join)
CUTS = st.lists(st.integers(1, 9), max_size=30)


def split(text: str, cuts: list[int], **options: bool) -> tuple[Split, bool]:
    splitter, start, reasoning, answer = ReasoningSplitter(**{"opened": False, **options}), 0, "", ""
    for cut in [*cuts, len(text)]:
        part = splitter.push(text[start : start + cut])
        reasoning, answer = reasoning + part.reasoning, answer + part.answer
        start += cut
    last = splitter.flush()
    return Split(reasoning + last.reasoning, answer + last.answer), splitter.inside


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nwhy\nnot\n</think>\n\nYes\n", False, "why\nnot", "Yes\n"),
        (" \n<think>a</think>b", False, "a", "b"),
        ("why\n</think>\n\n  Yes", True, "why", "  Yes"),
        ("<think>\nwhy</think>Yes", True, "why", "Yes"),
        ("no </think> thought <think>x</think>", False, "", "no </think> thought <think>x</think>"),
        ("<think></think>\n", False, "", ""),
        ("\n\na\n\n\nb\n\n</think>\n\n\nc\n", True, "a\n\n\nb", "c\n"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("never ends\n\n", True, "never ends", ""),
        ("\n <thinker>", False, "", "\n <thinker>"),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
        (" " * (MAX_SPACE + 1) + "<think>a</think>", False, "", " " * (MAX_SPACE + 1) + "<think>a</think>"),
    ],
)
def test_reasoning_goes_apart(text: str, opened: bool, reasoning: str, answer: str):
    assert split(text, [], opened=opened)[0] == (reasoning, answer)
    assert split(text, [1] * len(text), opened=opened)[0] == (reasoning, answer)


def test_inside_until_the_closing_tag():
    splitter = ReasoningSplitter(opened=True)
    splitter.push("a</think")
    assert splitter.inside
    splitter.push(">")
    assert not splitter.inside


@given(TEXT, CUTS, st.booleans(), st.booleans())
def test_any_cutting_gives_the_same(text: str, cuts: list[int], opened: bool, keep: bool):
    whole = split(text, [], opened=opened, keep=keep)
    assert split(text, cuts, opened=opened, keep=keep) == whole
    if keep:
        assert whole[0].reasoning + whole[0].answer == text


@given(TEXT, st.booleans())
def test_nothing_but_tags_and_line_breaks_is_dropped(text: str, opened: bool):
    (reasoning, answer), _ = split(text, [], opened=opened)
    at = text.index(reasoning)
    assert text.endswith(answer)
    dropped = text[:at] + text[at + len(reasoning) : len(text) - len(answer)]
    assert dropped.replace("<think>", "").replace("</think>", "").strip() == ""


@pytest.mark.parametrize(
    ("prompt", "form", "opened"),
    [
        ("<|im_start|>assistant\n", "qwen3", False),
        ("<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", False),
        ("<|Assistant|>", "deepseek-r1", True),
        ("<|Assistant|><think>\n", "deepseek-r1", True),
        ("<|Assistant|><think>\n\n</think>\n", "deepseek-r1", False),
    ],
)
def test_the_prompt_says_where_the_reply_begins(prompt: str, form, opened: bool):
    assert is_open(prompt, form) is opened
