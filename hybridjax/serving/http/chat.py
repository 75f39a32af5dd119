"""From a chat request to its prompt, and to how its completions are read."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import RequestError
from hybridjax.serving.api import Grammar, SamplingParams
from hybridjax.serving.http.bodies import Bodies, ChatBodies
from hybridjax.serving.http.content import Picture, load_images
from hybridjax.serving.http.generation import Front, Generation
from hybridjax.serving.http.messages import Message, Tool, callable_tools
from hybridjax.serving.http.protocol import ChatCompletionRequest, Conversation
from hybridjax.serving.http.replies import ReplyForms, ReplyPlan
from hybridjax.serving.http.tokens import TextTokenizer, TokenTexts
from hybridjax.serving.http.tool_grammar import behind_reasoning, strict_grammar, tool_grammar
from hybridjax.text import reasoning


def _same(params: SamplingParams) -> SamplingParams:
    return params


class Prepared(NamedTuple):
    """What to generate for a request and how to answer it.

    Attributes:
      prompts: token ids.
      bodies: of the answer.
      images: that each of the prompts has.
      adapt: turns the parameters that the request names into those that the engine gets.
    """

    prompts: list[list[int]]
    bodies: Bodies
    images: Sequence[np.ndarray] = ()
    adapt: Callable[[SamplingParams], SamplingParams] = _same


class Chats:
    """Prepares chat requests; what it needs to know of the chat template it finds out once."""

    def __init__(
        self, front: Front, tokenizer: TextTokenizer | None, texts: TokenTexts, config: ServerConfig
    ):
        self._front = front
        self._tokenizer = tokenizer
        self._texts = texts
        self.forms = ReplyForms() if tokenizer is None else ReplyForms.of(tokenizer, config)

    def prepare(
        self, body: ChatCompletionRequest, pictures: list[tuple[str, Picture]], generation: Generation
    ) -> Prepared:
        """Renders and encodes the prompt and decodes the images; raises RequestError."""
        tools = callable_tools(body.tools, body.tool_choice)
        text = self.render(body.conversation())
        # Templates write the special tokens themselves.
        prompt = self._front.encode(self.tokenizer(), text, "messages", add_special_tokens=False)
        plan = self._plan(body, tools, text)
        forced, strict = self._forced(body, plan), self._strict(body, plan, tools)
        support = self._front.engine.info.images
        # Last, because what is wrong with the rest is found out in far less time.
        images = load_images(pictures, support, generation.check_wanted) if support else ()

        def adapt(params: SamplingParams) -> SamplingParams:
            wanted = params.grammar
            if wanted is not None and forced is not None:
                raise RequestError("tool_choice and a grammar exclude each other", param="tool_choice")
            return dataclasses.replace(
                params,
                skip_special_tokens=params.skip_special_tokens and not plan.needs_special_tokens,
                grammar=forced or strict if wanted is None else behind_reasoning(wanted, plan.opened),
            )

        return Prepared([prompt], ChatBodies(body, self._texts, plan), images, adapt)

    def tokenizer(self, param: str = "messages") -> TextTokenizer:
        """The tokenizer; raises RequestError if it cannot render chats."""
        if self._tokenizer is None or not self._tokenizer.has_chat_template:
            lacks = "tokenizer" if self._tokenizer is None else "chat template"
            raise RequestError(f"this server has no {lacks}; use /v1/completions", param=param)
        return self._tokenizer

    def render(self, chat: Conversation) -> str:
        """The prompt as text; raises RequestError for what the template does not know."""
        tokenizer = self.tokenizer()
        no_calls = chat.tool_choice == "none"
        tools = [] if no_calls else [tool.for_template() for tool in chat.tools]
        if tools and not self.forms.use.tools:
            raise RequestError(
                "this model's chat template knows no tools; leave them out, or set tool_choice to 'none'",
                param="tools",
                code="tools_not_supported",
            )
        if any(message.tool_calls for message in chat.messages) and not (self.forms.use.calls or no_calls):
            raise RequestError(
                "messages has tool_calls, which this model's chat template does not know",
                param="messages",
                code="tools_not_supported",
            )
        continues = chat.continue_final_message
        opens = not continues if chat.add_generation_prompt is None else chat.add_generation_prompt
        if continues and opens:
            param = "continue_final_message"
            raise RequestError(f"{param} needs add_generation_prompt to be false", param=param)
        messages = [message.for_template() for message in chat.messages]
        text = tokenizer.render_chat(messages, tools or None, opens, **chat.options)
        return _up_to(text, chat.messages[-1]) if continues else text

    def _plan(self, body: ChatCompletionRequest, tools: list[Tool], prompt: str) -> ReplyPlan:
        forms, opened = self.forms, None
        if forms.reasoning is not None and not body.continue_final_message:
            opened = reasoning.is_open(prompt, forms.reasoning)
        elif forms.reasoning is not None:
            # What has been written of the turn so far says whether it is still thinking.
            last = _text_of(body.messages[-1])
            opened = last.rfind(reasoning.OPEN) > last.rfind(reasoning.CLOSE)
        is_forced = body.tool_choice not in (None, "none", "auto")
        is_named = is_forced and not isinstance(body.tool_choice, str)
        return ReplyPlan(
            forms=forms,
            calls=(forms.calls or ("json" if is_forced else None)) if tools else None,
            tools={tool.function.name: tool.function.schema_of_arguments for tool in tools},
            max_calls=None if body.parallel_tool_calls and not is_named else 1,
            opened=opened,
            keep_reasoning=not body.separate_reasoning,
            incremental=body.stream,
        )

    def _forced(self, body: ChatCompletionRequest, plan: ReplyPlan) -> Grammar | None:
        """What makes the model call a tool, if it has to."""
        if plan.calls is None or body.tool_choice in (None, "none", "auto"):
            return None
        return tool_grammar(plan.calls, plan.tools, many=plan.max_calls is None, opened=plan.opened)

    def _strict(self, body: ChatCompletionRequest, plan: ReplyPlan, tools: list[Tool]) -> Grammar | None:
        """What holds calls to strict tools, if the model is free to call them."""
        strict = [tool.function.name for tool in tools if tool.function.strict]
        if plan.calls is None or body.tool_choice not in (None, "auto"):
            return None
        if plan.needs_special_tokens:  # a grammar's text is never a special token
            return None
        return strict_grammar(plan.calls, plan.tools, strict, opened=plan.opened)


def _text_of(message: Message) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(p for p in content if isinstance(p, str))


def _up_to(text: str, last: Message) -> str:
    """A rendered conversation up to the end of the last message, without what closes its turn."""
    written = _text_of(last).strip()
    end = text.rfind(written)
    if last.role != "assistant" or last.tool_calls or not written or end < 0:
        raise RequestError(
            "continue_final_message needs the last message to be the assistant's, with a text that the chat "
            "template shows as it is",
            param="continue_final_message",
        )
    return text[: end + len(written)]
