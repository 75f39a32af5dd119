"""EBNF: the language stays what it was, and what is wrong is told with its line."""

import json
import re

import hypothesis.strategies as st
import pytest
from grammar_walks import accepts, walk
from hypothesis import given, settings

from hybridjax.structured.ebnf import ebnf_to_lark

CHARACTERS = "abc"


def parts(depth: int) -> st.SearchStrategy[tuple[str, str]]:
    """Pairs of EBNF and the regular expression that means the same."""
    literal = st.text(CHARACTERS, max_size=3).map(lambda s: (json.dumps(s), f"(?:{re.escape(s)})"))
    sets = st.sampled_from([("[ab]", "[ab]"), ("[^a]", "[^a]"), ("[a-b]", "[a-b]"), (".", "(?:.|\\n)")])
    if depth == 0:
        return literal | sets
    inner = parts(depth - 1)
    suffix = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}"])
    repeated = st.tuples(inner, suffix).map(lambda x: (f"({x[0][0]}){x[1]}", f"(?:{x[0][1]}){x[1]}"))
    sequence = st.lists(inner, min_size=1, max_size=3).map(
        lambda xs: ("(" + " ".join(x for x, _ in xs) + ")", "(?:" + "".join(y for _, y in xs) + ")")
    )
    choice = st.lists(inner, min_size=1, max_size=3).map(
        lambda xs: ("(" + " | ".join(x for x, _ in xs) + ")", "(?:" + "|".join(y for _, y in xs) + ")")
    )
    return inner | repeated | sequence | choice


@settings(max_examples=60)
@given(parts(2), parts(1), st.lists(st.text(CHARACTERS, max_size=6), min_size=4, max_size=4))
def test_regular_grammars_mean_what_their_regular_expression_means(compiler, tokenizer, first, second, texts):
    source = f'root ::= {first[0]} other | "b" other other\nother ::= {second[0]} # a comment\n'
    meaning = re.compile(f"{first[1]}{second[1]}|b{second[1]}{second[1]}")
    for text in texts:
        got = accepts(compiler.matcher("ebnf", source), text, tokenizer)
        assert got == (meaning.fullmatch(text) is not None), (source, text)
    tokens, ended = walk(compiler.matcher("ebnf", source), 0, most=40)
    text = b"".join(map(tokenizer.token_bytes, tokens))
    try:
        text = text.decode()
    except UnicodeDecodeError:
        assert not ended
        return
    assert not ended or meaning.fullmatch(text), (source, text)


JSON = r"""
root ::= object
object ::= "{" ws (pair (ws "," ws pair)*)? ws "}"
pair ::= string ws ":" ws value

value ::= object
  | array | string
  | number | "true" | "false" | "null"
array ::= "[" ws ( value ( ws "," ws value )* )? ws "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) ){0,20} "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,5}) ("." [0-9]{1,3})?
ws ::= [ \t\n]{0,2}   # bounded
"""


def test_recursive_grammars(compiler, tokenizer):
    for text in ('{"a":[1,{"b":"\\u00e9"}], "c": null}', "{}", '{ "x": -0.5 }', '{"true": true}'):
        assert accepts(compiler.matcher("ebnf", JSON), text, tokenizer), text
        json.loads(text)
    for text in ("[1]", '{"a":01}', '{"a":}', '{"a" 1}', '{"a":tru}', "{} "):
        assert not accepts(compiler.matcher("ebnf", JSON), text, tokenizer), text
    ended = 0
    for seed in range(12):
        tokens, done = walk(compiler.matcher("ebnf", JSON), seed)
        if done:
            json.loads(b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace"))
            ended += 1
    assert ended > 3


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        (r'root ::= "\x41\u00e9\U0001F600" [\u0042-D\]\-x]', ["Aé😀C", "Aé😀]", "Aé😀-"], ["Aé😀y"]),
        ('root ::= "a"\n | "b"\n\n | mid-dle\nmid-dle ::= "c" root | "d"', ["b", "ccca", "cd"], ["c", ""]),
        ('root ::= "(" root ")" | ""', ["", "((()))"], ["(()", "())"]),
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab"]),
        ('a ::= "x"+ root ::= a "x" a', ["xxx", "xxxxx"], ["xx"]),
    ],
)
def test_corners(compiler, tokenizer, source, texts, others):
    for text in texts:
        assert accepts(compiler.matcher("ebnf", source), text, tokenizer), text
    for text in others:
        assert not accepts(compiler.matcher("ebnf", source), text, tokenizer), text


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('start ::= "a"', "no rule named root"),
        ('root ::= "a" other', "'other', which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule 'root' is defined twice"),
        ('root ::= "a"\n\n"b" ::= "c"', "line 3"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "unexpected ')'"),
        ('root ::= "a', "unexpected"),
        ("root ::= [z-a]", "range"),
        ("root ::= []", "without characters"),
        (r'root ::= "\xZZ"', "hexadecimal"),
        (r'root ::= "\ud800"', "no character"),
        ('root ::= "a"{3,2}', "repeats"),
        ("root = 'a'", "line 1"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "more than 64 deep"),
        ("root ::= r0\n" + "\n".join(f'r{i} ::= "a"' for i in range(3000)), "more than 2000 rules"),
    ],
)
def test_errors_name_the_line(source, problem):
    with pytest.raises(ValueError, match="(?s).*" + re.escape(problem)):
        ebnf_to_lark(source)
