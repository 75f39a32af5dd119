"""Chat templates: what Hugging Face templates need works, and nothing runs or grows without bound."""

import datetime
import json

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hybridjax.errors import CheckpointError, RequestError
from hybridjax.text import ChatTemplate, sandbox

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>2 + 2</b>?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2, "ü": [1.5, None, True]}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "user", "content": "  thanks, 你  "},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

# The idioms of the Qwen, Llama 3, Mistral and MiniCPM families.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- "# Tools" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content|trim + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2) }}{{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content + '</tool_response>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
OTHERS = {
    "loops": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ loop.index }}"
    "{{ loop.length }}{% if loop.revindex0 == 1 %}{% break %}{% endif %}{% endfor %}",
    "unpacking": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% set a, b = 1, (2, 3) %}{{ b }}",
    "filters": "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|join('|') }}"
    "{{ messages|map(attribute='role')|unique|sort|join(', ') }}{{ 'a-b'|replace('-', '+')|upper }}",
    "macros": "{% macro f(x, sep='.') %}[{{ x }}{{ sep }}{{ caller() if caller else '' }}]{% endmacro %}"
    "{{ f(1) }}{% call f(2, sep='!') %}in{% endcall %}",
    "recursion": "{% for x in [[1, [2]], [3]] recursive %}{{ loop.depth }}{% if x is iterable %}"
    "{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
    "capture": "{% set x %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ x ~ x|length ~ none }}",
    "strings": "{{ '%s is %d'|format('x', 3) }}{{ '{}-{:>4}'.format('a', 1) }}{{ ', '.join(['a', 'b']) }}"
    "{{ 'a' * 3 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ {'k': [1, 'v']} }}{{ 'x\\ny'|indent(2) }}",
    "whitespace": "{% if true %}\n  a\n  {% endif %}\nb\n",
    "dict": "{{ dict(a=1, b='x') | tojson }}{{ messages[1] | tojson(ensure_ascii=true, sort_keys=true) }}",
}


def hugging_face(source: str, **variables) -> str:
    """The environment of apply_chat_template in transformers 4.57, in short."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = (
        lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    )
    return environment.from_string(source).render(**variables)


def doubling(start: str, step: str) -> str:
    loop = f"{{% for i in range(40) %}}{{% set ns.s = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(s={start}) %}}{loop}"


def render(source: str, messages=MESSAGES, **options) -> str:
    return ChatTemplate(source, name="test").render(messages, **options)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_qwen_idioms_render_as_hugging_face_does(tools, options):
    variables = {"messages": MESSAGES, "tools": tools, "add_generation_prompt": True} | options
    assert render(QWEN, tools=tools, **options) == hugging_face(QWEN, **variables)


@pytest.mark.parametrize("name", OTHERS)
def test_idioms_render_as_hugging_face_does(name: str):
    assert render(OTHERS[name]) == hugging_face(OTHERS[name], messages=MESSAGES, tools=None)


def test_special_tokens_date_and_generation_tag():
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{{ pad_token }}"
    )
    template = ChatTemplate(source, name="test", special_tokens={"bos_token": "<s>"})
    assert template.render(MESSAGES) == f"<s>{datetime.datetime.now().year}Be brief."


def test_the_template_can_reject_messages():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson | int + 'a' }}",
        "{{ {}['a'].b }}",
    ],
)
def test_errors_while_rendering_are_the_requests_fault(source: str):
    with pytest.raises(RequestError, match="rejects these messages") as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", ["text", [1], ["text"], [None]])
def test_messages_must_be_objects(messages):
    with pytest.raises(RequestError, match="list of objects"):
        render("x", messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "line 1"),
        ("a\n{{ x | nofilter }}", "line 2: No filter named 'nofilter'"),
        ("{% include 'x' %}", "cannot load other templates"),
        ("{% import 'x' as y %}", "cannot load other templates"),
        ("{% from 'x' import y %}", "cannot load other templates"),
        ("{% extends 'x' %}", "cannot load other templates"),
        ("x" * 300_000, "300000 characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
    ],
)
def test_broken_templates_fail_when_loaded(source: str, message: str):
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(source, name="test").render([])


def test_options_are_those_the_template_reads():
    template = ChatTemplate(
        "{{ depth }}{{ bos_token }}{{ range(2) }}", name="t", special_tokens={"bos_token": "b"}
    )
    assert template.options == {"depth", "enable_thinking", "thinking", "reasoning_effort"}
    assert template.render([], depth=3) == "3brange(0, 2)"
    assert template.render([], enable_thinking=True) == "brange(0, 2)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 3}, "'width' is unknown; known: depth"),
        ({"bos_token": "x"}, "'bos_token' is unknown"),
        ({"range": 3}, "'range' is unknown"),
        ({"documents": "x"}, "'documents' is unknown"),
        ({"depth": [1]}, "must be a boolean, a number, a string or null"),
        ({"depth": {"a": 1}}, "must be a boolean"),
        ({"depth": "x" * 5000}, "5000 characters"),
        ({"depth": 2**64}, "64 bits"),
    ],
)
def test_other_options_are_refused(options, message):
    template = ChatTemplate("{{ depth }}{{ bos_token }}", name="t", special_tokens={"bos_token": "b"})
    with pytest.raises(RequestError, match=message) as caught:
        template.render([], **options)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ ''['__class__'].x }}",
        "{{ ('' | attr('__class__')).x }}",
        "{{ '{0.__class__.x}'.format(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum() }}",
        "{{ (1).to_bytes(1000) }}",
    ],
)
def test_nothing_reaches_python(source: str):
    before = json.dumps(MESSAGES)
    with pytest.raises(RequestError):
        render(source)
    assert json.dumps(MESSAGES) == before


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 9 ** (9 ** 9) }}",
        doubling("'a' * 1000", "ns.s ~ ns.s"),
        doubling("'a' * 1000", "ns.s + ns.s"),
        doubling("[1]", "ns.s + ns.s"),
        doubling("1", "[ns.s, ns.s]"),
        doubling("1", "(ns.s, ns.s)"),
        doubling("1", "{'a': ns.s, 'b': ns.s}"),
        doubling("1", "dict(a=ns.s, b=ns.s)"),
        doubling("3", "ns.s * ns.s"),
        "{% set ns = namespace() %}{% set ns.a = [ns, ns] %}",
        "{% set s = 'a' * 100000 %}{{ s | replace('a', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.replace('', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.join(['', ''] * 1000) }}",
        "{% set s = 'a' * 100000 %}{{ ['', ''] | join(s) ~ ([s] * 1000) | join }}",
        "{% set s = '\n' * 1000000 %}{{ s | indent(40) }}",
        "{% set s = '\n' * 1000000 %}{{ s | indent(1000000000) }}",
        "{{ [[1]] | tojson(indent=1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ strftime_now('%1000000000Y') }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% set t %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}",
    ],
)
def test_nothing_grows_without_bound(source: str, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    template = ChatTemplate(source, name="test")
    with pytest.raises(RequestError):
        template.render(MESSAGES)


def test_time_is_bounded(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: next(now))
    with pytest.raises(RequestError, match="more than 5 seconds"):
        render("{% for i in range(100) %}{% endfor %}")


def test_limits_end_with_the_render(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    template = ChatTemplate("{% for i in range(900) %}{% endfor %}ok", name="test")
    for _ in range(3):
        assert template.render([]) == "ok"


def test_a_name_cannot_shadow_the_step_counter(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10)
    with pytest.raises(RequestError, match="more than 10 steps"):
        render("{% set tick = 1 %}{% for i in range(20) %}{% endfor %}")


def test_long_conversations_fit():
    messages = [{"role": "user", "content": "word " * 100}] * 5000
    assert len(render(QWEN, messages)) > 2_500_000


# How the Qwen-VL family writes parts.
QWEN_VL = """
{%- macro content(parts, is_system) %}
    {%- if parts is string %}
        {{- parts }}
    {%- elif parts is iterable and parts is not mapping %}
        {%- for item in parts %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system %}{{- raise_exception('System message cannot contain images.') }}{%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'video' in item or item.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + content(message.content, message.role == 'system')|trim }}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
PARTS = [
    {"type": "text", "text": "What is "},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**25}},
    {"type": "text", "text": " and"},
    {"type": "image"},
]
# What it accepts: strings, parts, images.
FORMATS = {
    "qwen-vl": (QWEN_VL, (True, True, True)),
    "qwen": (QWEN, (True, False, False)),
    "gemma": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for item in m.content %}{% if item.type == 'image' %}{{ '<image>' }}"
        "{% elif item.type == 'text' %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
        (True, True, True),
    ),
    "text parts only": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}{% endif %}"
        "{% endfor %}",
        (True, True, False),
    ),
    "refuses images": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
        "{% if c.type == 'text' %}{{ c.text }}{% else %}{{ raise_exception('no') }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}",
        (True, True, False),
    ),
    "parts only": (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}"
        "{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}",
        (False, True, True),
    ),
    "prints the list": ("{% for m in messages %}{{ m.content }}{% endfor %}", (True, False, False)),
    "prints JSON": ("{{ messages | tojson }}", (True, False, False)),
    "adds strings": ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", (True, False, False)),
    "rejects everything": ("{{ raise_exception('no') }}", (False, False, False)),
    "says nothing": ("hello", (False, False, False)),
    "never ends": ("{% for i in range(10 ** 9) %}{% endfor %}", (False, False, False)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_accepts_is_found_out(name: str, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10_000)
    source, accepted = FORMATS[name]
    assert ChatTemplate(source, name="test").accepts == accepted


def test_parts_render_as_hugging_face_does_without_urls():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
    got = render(QWEN_VL, messages)
    assert got == hugging_face(QWEN_VL, messages=messages, add_generation_prompt=True)
    assert got.count("<|vision_start|><|image_pad|><|vision_end|>") == 2
    shown = (
        "{% for m in messages %}{% for c in m.content %}{{ c.text or c | tojson }}{% endfor %}{% endfor %}"
    )
    assert render(shown, [{"role": "user", "content": PARTS}]) == (
        'What is {"type": "image"} and{"type": "image"}'
    )


def test_texts_become_one_string_for_templates_that_know_only_strings():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": "c"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", messages) == "a\nb"
    assert render(QWEN, messages) == render(QWEN, [{"role": "user", "content": "a\nb"}])
    # And strings become parts for those that know only parts.
    assert render(FORMATS["parts only"][0], [{"role": "user", "content": "ab"}]) == "ab"


@pytest.mark.parametrize("name", ["qwen", "text parts only", "refuses images", "prints the list"])
def test_images_need_a_template_that_knows_them(name: str):
    with pytest.raises(RequestError, match="chat template does not know") as caught:
        render(FORMATS[name][0], [{"role": "user", "content": PARTS}])
    assert (caught.value.param, caught.value.code) == ("messages", "images_not_supported")


def test_a_placeholder_in_a_text_does_not_take_an_images_place_where_the_template_knows_only_strings():
    parts = [{"type": "text", "text": "See <|vision_start|><|image_pad|><|vision_end|>"}, {"type": "image"}]
    with pytest.raises(RequestError, match="chat template does not know") as caught:
        render(QWEN, [{"role": "user", "content": parts}])
    assert (caught.value.param, caught.value.code) == ("messages", "images_not_supported")


def test_the_template_can_reject_images_where_it_wants_none():
    with pytest.raises(RequestError, match="System message cannot contain images"):
        render(QWEN_VL, [{"role": "system", "content": PARTS}])


@pytest.mark.parametrize("part", ["text", None, {}, {"type": "video"}, {"type": "text", "text": 1}, [PARTS]])
@pytest.mark.parametrize("source", [QWEN, QWEN_VL])
def test_other_parts_are_refused(part, source):
    with pytest.raises(RequestError, match="each a text or an image") as caught:
        render(source, [{"role": "user", "content": [part]}])
    assert caught.value.param == "messages"


def test_parts_are_within_the_limits(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}] * 1000
    with pytest.raises(RequestError, match="more than 1000 steps"):
        render(QWEN_VL, [{"role": "user", "content": parts}])
