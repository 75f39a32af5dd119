"""What templates make of tools is found out by trying."""

import json

import pytest
from small_tokenizers import byte_level
from test_chat_template import FORMATS, QWEN

from hybridjax.text import ChatTemplate, ToolUse, load_tokenizer, sandbox
from hybridjax.text.chat_template import PROBE_TOOL
from hybridjax.text.tool_calls import detect

TEXT_ARGUMENTS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '<sep>' + c.function.arguments }}{% endfor %}"
    "{% endfor %}"
)
XML = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}"
)
LLAMA = (
    "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls|length == 1 %}"
    "{{ raise_exception('one at a time') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "use", "form"),
    [
        (QWEN, (True, True, False), "hermes"),
        (XML, (True, True, False), "qwen3_coder"),
        (LLAMA, (True, True, False), "json"),
        (TEXT_ARGUMENTS, (True, True, True), None),
        (FORMATS["adds strings"][0], (False, False, False), None),
        ("{{ tools | tojson }}", (True, False, False), None),
        ("{{ raise_exception('no') }}", (False, False, False), None),
    ],
)
def test_what_a_template_makes_of_tools(source: str, use: tuple[bool, bool, bool], form: str | None):
    found = ChatTemplate(source, name="test").tool_use
    assert found[:3] == use
    assert detect(found.sample, PROBE_TOOL) == form


def test_a_template_that_never_ends_knows_no_tools(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    assert ChatTemplate(FORMATS["never ends"][0], name="test").tool_use == ToolUse()


def test_arguments_are_what_the_template_wants():
    function = {"name": "add", "arguments": {"ü": [1, None]}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]
    text = ChatTemplate(TEXT_ARGUMENTS, name="test").render(messages)
    assert text == 'xadd<sep>{"ü": [1, null]}'
    assert (
        ChatTemplate(XML, name="test")
        .render(messages)
        .endswith("<function=add>\n<parameter=ü>\n[1, None]\n</parameter>\n</function>\n</tool_call>")
    )
    assert function["arguments"] == {"ü": [1, None]}


@pytest.mark.parametrize(
    ("source", "reasons"), [("{{ '<think>' }}", True), ("{{ x.split('</think>') }}", True), ("think", False)]
)
def test_templates_that_know_reasoning(source: str, reasons: bool):
    assert ChatTemplate(source, name="test").reasons is reasons


def test_the_tokenizer_says_what_its_templates_know(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.tool_use, tokenizer.chat_reasons) == (ToolUse(), False)
    templates = [{"name": "default", "template": "<think>"}, {"name": "tool_use", "template": QWEN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tool_use == ChatTemplate(QWEN, name="test").tool_use and tokenizer.chat_reasons
