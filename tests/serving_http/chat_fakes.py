"""Small chat templates with tools and reasoning, in the manner of the Qwen families, and their tokenizer."""

from typing import Any

from http_fakes import ByteTokenizer

from hybridjax.text import ChatTemplate

_HEAD = """
{%- if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}
    {{- '[' + message.role + ']' }}
    {%- if message.tool_call_id %}{{ '(' + message.tool_call_id + ')' }}{% endif %}
"""
_THOUGHT = """
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}"""
_CALLS = """
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}"""
_TAIL = """
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}"""
_CALL = """
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
_XML_CALL = """
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}"""
_THINK = """{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false }}"""
_OPEN = """{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' }}"""

TOOLS = _HEAD + _CALLS + _CALL + _TAIL + "{% endif %}"  # Qwen2.5
THINKING = _HEAD + _THOUGHT + _CALLS + _CALL + _TAIL + _THINK + "{% endif %}"  # Qwen3
OPENED = (
    _HEAD + _THOUGHT + _CALLS + _XML_CALL + _TAIL + _OPEN + "{% endif %}"
)  # Qwen3-Coder's calls, and always the tag
EFFORT = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"


class TemplateTokenizer(ByteTokenizer):
    """Renders chats with a real template."""

    def __init__(self, source: str):
        super().__init__()
        self._template = ChatTemplate(source, name="test")
        self.tool_use = self._template.tool_use
        self.chat_reasons = self._template.reasons

    def render_chat(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        self.rendered.append(messages)
        return self._template.render(messages, tools, add_generation_prompt, **kwargs)
