"""Grammars before their requests are accepted: what is refused, what it costs, and what is kept."""

import concurrent.futures
import json
import os
import re
import signal
import threading
import time

import pytest
from grammar_walks import EOS, accepts, allowed, walk

from hybridjax.errors import HybridJaxError, QueueFullError, RequestError
from hybridjax.structured import GrammarCompiler, GrammarLimits
from hybridjax.structured.sandbox import MAX_WAITING


def chain(count: int, rule: str, last: str) -> str:
    rules = [f"r{i}: {rule.format(f'r{i + 1}')}" for i in range(count)]
    return "\n".join(["start: r0", *rules, f"r{count}: {last}"])


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


WRONG = [
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[1]", "an object, true or false"),
    ("json_schema", "false", "nothing can match"),
    ("json_schema", '{"type": 7}', "type must be"),
    ("json_schema", '{"type": "object", "not": {}}', "not"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
    ("json_schema", '{"const": "\\ud800"}', ""),
    ("json_schema", '{"$ref": "#"}', "nothing can match"),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', ""),
    ("json_schema", '{"$ref": "#/nowhere"}', ""),
    ("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}', "does not fetch"),
    ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
    ("json_schema", nested(100), "64 levels"),
    ("json_schema", nested(20_000), "bytes"),
    ("json_schema", "[" * 30_000, ""),
    (
        "json_schema",
        '{"minimum": 100000000000000000000}',
        "minimum is 100000000000000000000;",
    ),
    (
        "json_schema",
        '{"items": {"exclusiveMaximum": -9007199254740992}}',
        "exclusiveMaximum is -9007199254740992;",
    ),
    ("json_schema", '{"anyOf": [{"maximum": 1e999999}]}', "maximum is 1E+999999; numbers must be between"),
    ("json_schema", '{"maximum": 1e99999999999999999999}', "exponent"),
    ("json_schema", '{"minimum": NaN}', "minimum is nan;"),
    ("json_schema", f'{{"minimum": -1{"0" * 1000}}}', "minimum is about -1e1000;"),
    ("json_schema", '{"minimum": 1e-300}', "minimum is 1E-300;"),
    ("json_schema", '{"maximum": 0.12345678901234567891}', "more digits than a double"),
    ("json_schema", '{"multipleOf": 1e100}', "multipleOf is 1E+100;"),
    (
        "json_schema",
        '{"$defs": {"a": {"const": {"b": [18446744073709551617]}}}}',
        "const is 18446744073709551617;",
    ),
    (
        "json_schema",
        '{"properties": {"minimum": {"enum": [1, 9007199254740993]}}}',
        "enum is 9007199254740993;",
    ),
    ("json_schema", '{"type": "string", "maxLength": 4294967296}', "maxLength is 4294967296;"),
    ("json_schema", '{"type": "array", "minItems": 1e300}', "minItems is 1E+300;"),
    ("json_schema", '{"type": "object", "minProperties": -1}', "minProperties is -1;"),
    ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(10_000)]}), "65536"),
    ("regex", "", "empty"),
    ("regex", "(a", "unclosed group"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", "\ud800", "lone surrogate"),
    ("regex", "[^\\x00-\\U0010FFFF]", "nothing can match"),
    ("regex", "((a{100}){100}){100}", "too complex"),
    ("regex", "(" * 5000 + "a" + ")" * 5000, "nested"),
    ("regex", "a" * 70_000, "at most 65536"),
    ("regex", "(a|b|c)?" * 5000, ""),
    ("ebnf", 'root ::= "a', "line 1"),
    ("ebnf", "", "empty"),
    ("lark", "start: a", ""),
    ("lark", "start: a\na: b\nb: a", "nothing can match"),
    ("lark", 'start: A\nA: B "a"\nB: A', "circular"),
    ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "nested"),
    ("lark", chain(30, "{0} {0}", '"a"'), "too complex"),
    ("lark", 'start: ("a" "b"){1000000}', "too complex"),
    ("lark", 'start: x{1,40}\nx: "a" | "ab" | "aba" | x x', "too complex"),
    ("lark", "%import .etc.passwd\nstart: INT", "Unknown"),
    ("lark", "start: a b\na[lazy]: /.*/\nb: /x/", ""),
    ("no_such_kind", "a", "unknown kind"),
]


@pytest.mark.parametrize(("kind", "source", "problem"), WRONG, ids=[repr(row[:2])[:50] for row in WRONG])
def test_what_is_wrong_with_a_grammar_is_told(compiler, kind, source, problem):
    with pytest.raises(RequestError) as error:
        compiler.matcher(kind, source, "the_field")
    assert error.value.param == "the_field"
    assert str(error.value).startswith("the_field: ")
    assert problem in str(error.value)
    assert len(str(error.value)) < 600


# Each of these hangs, takes gigabytes, or overflows a thread's stack if llguidance is let at it as it is.
HOSTILE = [
    ("regex", "a?" * 30_000 + "a" * 1000),
    ("regex", r"\p{L}*\w?" * 5000),
    ("lark", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}.*/" for i in range(1, 100))),
    ("lark", "start: A\nA: ~/.*a.{100}.*/ & ~/.*b.{90}.*/ & ~/.*c.{80}/ & /.{200}/"),
]


@pytest.fixture(scope="module")
def hasty(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS, GrammarLimits(seconds=1))
    compiler.warm()
    yield compiler
    compiler.close()


@pytest.mark.parametrize(("kind", "source"), HOSTILE, ids=[row[1][:30] for row in HOSTILE])
def test_a_grammar_that_hangs_the_compiler_is_refused(hasty, kind, source):
    with pytest.raises(RequestError, match="too complex") as error:
        hasty.matcher(kind, source, "regex")
    assert error.value.param == "regex"
    assert allowed(hasty.matcher("regex", "[ab]"))


REFERENCES = {i: {"$ref": f"#/$defs/{i + 1}"} for i in range(1900)} | {1900: {"const": 1}}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        # 8 MiB of stack are not enough for these.
        ("lark", chain(4000, "{}", '"a"')),
        ("json_schema", json.dumps({"$ref": "#/$defs/0", "$defs": REFERENCES})),
    ],
    ids=["rules", "references"],
)
def test_long_chains_need_a_deep_stack(compiler, kind, source):
    assert walk(compiler.matcher(kind, source), 0)[1]


def test_a_process_that_has_died_is_replaced(hasty):
    hasty.warm()
    for _ in range(3):
        before = hasty._sandbox._process.pid
        os.kill(before, signal.SIGKILL)
        hasty._sandbox._process.wait()
        hasty._cache.clear()
        assert allowed(hasty.matcher("regex", "[ab]"))
        assert hasty._sandbox._process.pid != before


def test_a_process_that_dies_over_a_grammar_refuses_it(hasty):
    hasty.warm()
    process = hasty._sandbox._process
    os.kill(process.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RequestError, match="too complex"):
        hasty.matcher("regex", "never tried")
    assert time.monotonic() - start < 60
    assert process.poll() is not None
    assert allowed(hasty.matcher("regex", "tried"))


def test_waiting_for_others_ends_with_a_full_queue(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS, GrammarLimits(seconds=1))
    with compiler._sandbox._lock, concurrent.futures.ThreadPoolExecutor(20) as pool:
        start = time.monotonic()
        jobs = [pool.submit(compiler.matcher, "regex", "a" * n) for n in range(1, 21)]
        errors = [job.exception() for job in concurrent.futures.as_completed(jobs)]
        assert all(isinstance(error, QueueFullError) for error in errors)
        waited = sum("taking too long" in str(error) for error in errors)
        assert waited == MAX_WAITING and time.monotonic() - start < 30
    assert allowed(compiler.matcher("regex", "a"))
    compiler.close()
    with pytest.raises(HybridJaxError, match="shut down"):
        compiler.matcher("regex", "a")


def test_closing_ends_what_is_being_tried_out(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS)
    compiler.warm()
    process = compiler._sandbox._process
    os.kill(process.pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(compiler.matcher, "regex", "a")
        while not compiler._in_progress:
            time.sleep(0.01)
        compiler.close()
        assert "shut down" in str(job.exception(60))
    assert process.poll() is not None and compiler._sandbox._process is None
    compiler.close()


def test_the_cache_is_bounded_by_count_and_bytes(tokenizer):
    limits = GrammarLimits(cached_grammars=3, cached_bytes=12_800)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS, limits)
    built = []
    build = compiler._build
    compiler._build = lambda grammar: built.append(grammar) or build(grammar)
    try:
        for source in ("a", "b", "c", "a", "d", "a", "b"):  # b is the first to go
            compiler.matcher("regex", source)
        assert len(built) == 5 and compiler.cached == 3
        compiler.matcher("lark", 'start: "a"')  # the kind is part of the key
        assert len(built) == 6
        compiler.matcher("regex", "x" * 6000)
        assert compiler.cached == 1
        compiler.matcher("regex", "x" * 7500)
        assert compiler.cached == 0 and compiler._cached_bytes == 0
        with pytest.raises(RequestError):
            compiler.matcher("regex", "(")
        assert compiler.cached == 0 and not compiler._in_progress
    finally:
        compiler.close()


def test_requests_of_one_grammar_do_not_share_limits_or_errors(tokenizer):
    """llguidance's own copies would: once one has used up the lexer's states, all of them fail."""
    limits = GrammarLimits(lexer_states=100, trial_tokens=3)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS, limits)
    try:
        other = compiler.matcher("regex", "[ab]*a[ab]{9}")
        with pytest.raises(HybridJaxError, match="too many states"):
            for seed in range(50):
                walk(compiler.matcher("regex", "[ab]*a[ab]{9}"), seed, most=300)
        for matcher in (other, compiler.matcher("regex", "[ab]*a[ab]{9}")):
            for token in allowed(matcher)[:1] * 3:
                assert token in allowed(matcher)
                matcher.accept(token)
    finally:
        compiler.close()


def test_masks_do_not_wait_for_new_grammars(tokenizer):
    compiler, go = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS), threading.Event()
    try:
        running = compiler.matcher("regex", "[ab]{9}")
        fresh = compiler._fresh
        compiler._fresh = lambda grammar: (go.wait(60), fresh(grammar))[1]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            new = [pool.submit(compiler.matcher, "regex", "[ab]{9}") for _ in range(8)]
            while compiler._builders._work_queue.qsize() == 0:
                time.sleep(0.01)
            for _ in range(3):
                running.accept(allowed(running)[0])
                assert running.wait(60)
            assert not any(job.done() for job in new)
            go.set()
            for job in new:
                assert job.result(60).ready
    finally:
        go.set()
        compiler.close()


def test_equal_grammars_are_compiled_once_though_asked_for_together(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS)
    built = []
    build = compiler._build

    def slowly(grammar):
        built.append(grammar)
        time.sleep(0.2)
        return build(grammar)

    compiler._build = slowly
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            good = [pool.submit(compiler.matcher, "regex", "[ab]{3}") for _ in range(8)]
            assert all(len(walk(job.result(), i)[0]) <= 3 for i, job in enumerate(good))
            assert len(built) == 1
            bad = [pool.submit(compiler.matcher, "regex", "[ab", f"field{i}") for i in range(8)]
            for i, job in enumerate(bad):
                error = job.exception()
                assert isinstance(error, RequestError) and error.param == f"field{i}"
                assert str(error).startswith(f"field{i}: ")
    finally:
        compiler.close()


SCHEMAS = [
    {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["x", 'with "quotes"', 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
]


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ('{"type":"integer","minimum":9007199254740991}', ["9007199254740991"], ["9007199254740990"]),
        ('{"type":"integer","exclusiveMinimum":9007199254740991}', [], ["9007199254740991", "5"]),
        ('{"type":"integer","maximum":-9007199254740991}', ["-9007199254740991"], ["-9007199254740990"]),
        ('{"type":"number","minimum":1e-50}', ["1", f"0.{'0' * 49}1"], [f"0.{'0' * 50}1", "0"]),
        ('{"const":9007199254740991}', ["9007199254740991"], []),
        ('{"type":"string","maxLength":4294967295}', ['""'], []),
        ('{"type":"object","properties":{"minimum":{"type":"string"}}}', ['{"minimum":"1e30"}'], []),
        ('{"type":"integer","default":1e30,"examples":[{"minimum":1e30}]}', ["5"], []),
    ],
)
def test_numbers_up_to_the_limits_are_kept_to(compiler, tokenizer, schema, texts, others):
    for text in texts:
        assert accepts(compiler.matcher("json_schema", schema), text, tokenizer)
    for text in others:
        assert not accepts(compiler.matcher("json_schema", schema), text, tokenizer)


def test_every_character_can_stand_in_a_literal(compiler, tokenizer):
    for source in ('start: "{}"', "start: /{}/", 'start: A\nA: "a" | "{}"'):
        for text in ("\x7f", "\x85", "\u2028"):
            assert accepts(compiler.matcher("lark", source.format(text)), text, tokenizer)
    assert accepts(compiler.matcher("ebnf", 'root ::= "\x7f"'), "\x7f", tokenizer)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_whatever_follows_the_masks_matches(compiler, tokenizer, schema):
    for seed in range(5):
        tokens, ended = walk(compiler.matcher("json_schema", json.dumps(schema)), seed)
        if ended:
            value = json.loads(b"".join(map(tokenizer.token_bytes, tokens)))
            assert value in schema.get("enum", [value])
            assert not isinstance(value, dict) or (set(value) == {"a"} and type(value["a"]) is int)


@pytest.mark.parametrize(
    "regex", ["[a-f0-9]{4}(-[a-f0-9]{2}){1,2}", "(yes|no|maybe)!?", r"\d{1,3}(\.\d+)?é*"]
)
def test_whatever_follows_the_masks_of_a_regular_expression_matches(compiler, tokenizer, regex):
    ends = 0
    for seed in range(10):
        tokens, ended = walk(compiler.matcher("regex", regex), seed)
        text = b"".join(map(tokenizer.token_bytes, tokens)).decode()
        ends += ended
        assert not ended or re.fullmatch(regex, text)
    assert ends


def test_any_object_and_bounded_white_space(compiler, tokenizer):
    for text, fits in (
        ('{"a": [1, "x", null, {}]}', True),
        ("{\n" + 30 * " " + '"a": 1}', True),
        ("{\n" + 40 * " " + '"a": 1}', False),
        ("[]", False),
        ("{} ", False),
    ):
        assert accepts(compiler.matcher("json_object", ""), text, tokenizer) == fits, text
    assert accepts(compiler.matcher("json_schema", "true"), "[1]", tokenizer)
    tight = json.dumps({"type": "array", "x-guidance": {"whitespace_flexible": False}})
    assert accepts(compiler.matcher("json_schema", tight), "[1,2]", tokenizer)
    assert not accepts(compiler.matcher("json_schema", tight), "[ 1,2]", tokenizer)


def test_special_tokens_are_no_text(compiler, tokenizer):
    matcher = compiler.matcher("regex", "(.|\n){5,10}")
    assert len(allowed(matcher)) > 1500
    assert not set(allowed(matcher)) & tokenizer.special_ids
    literal = compiler.matcher("lark", 'start: "</s><|im_end|>"')
    tokens, ended = walk(literal, 0)
    assert ended and not set(tokens) & tokenizer.special_ids
    assert b"".join(map(tokenizer.token_bytes, tokens)) == b"</s><|im_end|>"


def test_a_model_with_fewer_tokens_than_its_tokenizer(tokenizer):
    compiler = GrammarCompiler(tokenizer, 1001, EOS)
    try:
        matcher = compiler.matcher("regex", "(.|\n)*")
        assert matcher.mask().shape == (32,)
        assert max(allowed(matcher)) < 1001
    finally:
        compiler.close()


def test_a_model_with_more_tokens_than_its_tokenizer(tokenizer):
    compiler = GrammarCompiler(tokenizer, 5000, EOS)
    try:
        matcher = compiler.matcher("regex", "(.|\n)*")
        assert matcher.mask().shape == (157,)
        assert max(allowed(matcher)) < tokenizer.id_limit
    finally:
        compiler.close()


def test_no_end_token_no_grammars(tokenizer):
    with pytest.raises(HybridJaxError, match="end token"):
        GrammarCompiler(tokenizer, 2048, (5000,))
    assert not GrammarCompiler.supports(object())


@pytest.mark.parametrize("own", [{}, {"x-guidance": {"whitespace_flexible": True}}])
def test_an_escaped_name_is_no_way_around_a_propertys_schema(compiler, tokenizer, own):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]} | own
    for text, fits in (
        (r'{"a": 1, "\u0061": "x"}', False),
        (r'{"a": 1, "b": "\n\""}', True),
        ('{"a": 1, "\u00e4": "\u00fc"}', True),
    ):
        assert accepts(compiler.matcher("json_schema", json.dumps(schema)), text, tokenizer) == fits, text
    closed = json.dumps(schema | {"additionalProperties": False})
    assert accepts(compiler.matcher("json_schema", closed), '{"a": 1}', tokenizer)
    texts = json.dumps(
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    )
    assert accepts(compiler.matcher("json_schema", texts), r'{"a": "\u0007"}', tokenizer)
