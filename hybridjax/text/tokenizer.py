"""Tokenizers read from ``tokenizer.json``; no transformers, no downloads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from hybridjax.errors import CheckpointError, RequestError
from hybridjax.json_files import read_object
from hybridjax.text.byte_alphabet import BYTE_OF_CHAR
from hybridjax.text.chat_template import ChatTemplate, ToolUse
from hybridjax.text.token_length import longest_token_bytes


def load_tokenizer(path: str | Path, chat_template: str | Path | None = None) -> "Tokenizer":
    """Reads a tokenizer in the Hugging Face layout.

    Beside tokenizer.json, the directory may hold tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja, which goes before the template in tokenizer_config.json.

    Args:
      path: a directory with tokenizer.json, or that file.
      chat_template: a file with a Jinja template to use instead; a string with braces is taken for the
        template itself.

    Raises:
      CheckpointError: a file is missing or malformed, a bos or eos token is not in the vocabulary,
        a setting has the wrong type, or a template does not compile.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; a tokenizer needs its tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
        spec = json.loads(backend.to_str())
    except Exception as error:  # the Rust side raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    settings = _read_json(file.with_name("special_tokens_map.json"))
    settings |= _read_json(file.with_name("tokenizer_config.json"))
    _check_settings(file.parent, settings)
    special = {name: text for name in settings if (text := _token_text(settings[name], name)) is not None}
    if chat_template is None:
        sources = _template_sources(file.parent, settings)
    else:
        sources = {"default": _given_template(chat_template)}
    templates = {
        name: ChatTemplate(source, name=f"{file.parent} ({name})", special_tokens=special)
        for name, source in sources.items()
    }
    try:
        return Tokenizer(backend, spec, special, settings.get("add_bos_token"), templates)
    except CheckpointError as error:
        raise CheckpointError(f"{file.parent}: {error}") from error


class Tokenizer:
    """Text to token ids and back, and chat messages to text. Made by ``load_tokenizer``.

    Attributes:
      vocab_size: number of tokens, added ones included.
      id_limit: ids from here on stand for no token; a model may have rows for them.
      bos_token, eos_token: their texts, None if the tokenizer has none.
      bos_token_id, eos_token_id: their ids, None likewise. The model's own list of end tokens is in
        its config and may be longer.
      special_ids: ids that ``decode`` leaves out by default.
      has_token_bytes: whether a token stands for the same bytes wherever it stands.
      longest_token_bytes: the most UTF-8 bytes of a text that one token covers; None if this tokenizer
        has no sure bound.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spec: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        add_bos_token: bool | None,
        templates: Mapping[str, ChatTemplate],
    ):
        backend.no_truncation()  # a stored limit would silently shorten prompts
        backend.no_padding()
        self._backend = backend
        self._templates = dict(templates)
        self._bytes_of: dict[int, bytes] = {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.id_limit: int = max(ids, default=-1) + 1
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.bos_token_id = self._id_of("bos_token", self.bos_token)
        self.eos_token_id = self._id_of("eos_token", self.eos_token)
        # The bos token may come from tokenizer.json's post-processor; it must not come twice.
        adds_bos = self._leads_with_bos()
        wants_bos = adds_bos if add_bos_token is None else add_bos_token
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        self._prepended = bos if wants_bos and not adds_bos else []
        self._drop_bos = adds_bos and not wants_bos
        decoder = spec.get("decoder")
        kinds = [] if decoder is None else [decoder, *decoder.get("decoders", [])]
        kinds = [kind["type"] for kind in kinds if kind["type"] != "Sequence"]
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in kinds
        self.has_token_bytes = self.is_byte_level or self.has_byte_fallback
        normalizer = backend.normalizer
        self.longest_token_bytes = longest_token_bytes(
            spec, normalizer.normalize_str if normalizer is not None else str
        )

    def _id_of(self, name: str, token: str | None) -> int | None:
        if token is None:
            return None
        index = self._backend.token_to_id(token)
        if index is None:
            raise CheckpointError(f"{name} is {token!r}, which is not in the vocabulary")
        return index

    def _leads_with_bos(self) -> bool:
        ids = self._backend.encode("", add_special_tokens=True).ids
        return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
          text: any text; special tokens written out in it become those tokens.
          add_special_tokens: add the bos token and whatever else the tokenizer adds to a text. False for
            rendered chats, whose template writes them.

        Raises:
          RequestError: the text holds half of a surrogate pair, which no encoding can represent.
        """
        try:
            # A batch, because encoding a single text would stop every other thread meanwhile.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate") from error
        if not add_special_tokens:
            return ids
        return self._prepended + ids[1 if self._drop_bos else 0 :]

    def too_long(self, text: str, max_tokens: int) -> bool:
        """Whether ``encode(text)`` certainly has more than ``max_tokens`` tokens, without encoding.

        False says nothing, in particular where there is no bound on what a token covers.
        """
        longest = self.longest_token_bytes
        # The token that encode drops may be one of the text where the tokenizer's template is odd.
        most = max_tokens + self._drop_bos
        if longest is None or 4 * len(text) <= most * longest:
            return False
        try:
            return len(text.encode()) > most * longest
        except UnicodeEncodeError:  # encode says so
            return False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the vocabulary have none.

        Raises:
          RequestError: an id is negative or beyond 32 bits.
        """
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RequestError("token ids must be between 0 and 2**32 - 1") from error

    def serialized(self) -> str:
        """What tokenizer.json says, for libraries that read it themselves."""
        return self._backend.to_str()

    def id_to_token(self, index: int) -> str | None:
        """The token as the vocabulary spells it, None beyond the vocabulary."""
        return self._backend.id_to_token(index)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token of a byte-level tokenizer stands for; empty beyond the vocabulary."""
        found = self._bytes_of.get(index)
        if found is None:
            token = self._backend.id_to_token(index) or ""
            known = all(char in BYTE_OF_CHAR for char in token)
            # A token with other characters (an added one) stands for its own text.
            found = bytes(BYTE_OF_CHAR[char] for char in token) if known else token.encode()
            self._bytes_of[index] = found
        return found

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt for chat messages; see ``ChatTemplate.render``.

        Of several named templates, ``tool_use`` is taken when there are tools, else ``default``.

        Raises:
          RequestError: there is no chat template, or it rejects the messages or an option.
        """
        template = self._template(with_tools=bool(tools))
        return template.render(messages, tools, add_generation_prompt, **options)

    @property
    def tool_use(self) -> ToolUse:
        """What the chat template makes of tools; nothing if there is none."""
        template = self._templates.get("tool_use") or self._templates.get("default")
        return template.tool_use if template is not None else ToolUse()

    @property
    def chat_reasons(self) -> bool:
        """Whether the chat template knows of ``<think>``."""
        return any(template.reasons for template in self._templates.values())

    def _template(self, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise RequestError("this model has no chat template; use plain completions", param="messages")
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            known = ", ".join(sorted(self._templates))
            raise RequestError(f"this model has no default chat template, only {known}", param="messages")
        return template


def _read_json(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}


def _check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Refuses the settings that are used and have another type than they should."""
    file = directory / "tokenizer_config.json"
    adds_bos = settings.get("add_bos_token")
    if adds_bos is not None and type(adds_bos) is not bool:
        raise CheckpointError(f"{file}: add_bos_token is {adds_bos!r}; it must be true, false or null")
    for name in ("bos_token", "eos_token"):
        value = settings.get(name)
        if value is not None and _token_text(value, name) is None:
            raise CheckpointError(
                f"{file}: {name} is {value!r}; it must be a string, an object with content, or null"
            )


def _token_text(value: Any, name: str) -> str | None:
    """The text of ``bos_token`` and the like: a string or a serialised AddedToken."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = directory / "chat_template.jinja"
    if file.exists():
        return {"default": _read_template(file)}
    value = settings.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = value if isinstance(value, dict) else {item["name"]: item["template"] for item in value}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{directory}/tokenizer_config.json: chat_template must be a string, or a list of objects with "
            "name and template"
        ) from error
    for name, source in named.items():
        if not isinstance(source, str):
            raise CheckpointError(f"{directory}/tokenizer_config.json: chat template {name!r} is no string")
    return named


def _given_template(value: str | Path) -> str:
    if isinstance(value, str) and "{" in value:
        return value
    return _read_template(Path(value))


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot read the chat template: {error}") from error
