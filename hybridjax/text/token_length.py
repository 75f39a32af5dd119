"""How much text one token can cover, from what tokenizer.json says.

A bound is given only for tokenizers whose every step is known to keep or lengthen the text and to spend
a token on all of it; any other step might delete text or swallow it whole.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridjax.text.byte_alphabet import BYTE_OF_CHAR

_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Punctuation", "Digits", "UnicodeScripts"}
_KEEPING_POST_PROCESSORS = {"ByteLevel", "BertProcessing", "RobertaProcessing", "TemplateProcessing"}


def longest_token_bytes(spec: Mapping[str, Any], normalize: Callable[[str], str]) -> int | None:
    """The most UTF-8 bytes of a text that one of its tokens can cover; None if there is no sure bound.

    Args:
      spec: the content of tokenizer.json.
      normalize: what the tokenizer's normalizer makes of a text.
    """
    pre_tokenizers = list(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
    byte_level = bool(pre_tokenizers) and pre_tokenizers[-1]["type"] == "ByteLevel"
    keeps_text = (
        all(map(_normalizer_keeps, _steps(spec.get("normalizer"), "normalizers")))
        and all(map(_pre_tokenizer_keeps, pre_tokenizers))
        and all(map(_post_processor_keeps, _steps(spec.get("post_processor"), "processors")))
    )
    if not keeps_text or not _covers_every_byte(spec["model"], byte_level):
        return None
    # Each character of a byte-level token stands for one byte.
    longest = max(len(token) if byte_level else len(token.encode()) for token in spec["model"]["vocab"])
    for token in spec.get("added_tokens") or []:
        if token["lstrip"] or token["rstrip"]:  # takes any amount of white space with it
            return None
        content = token["content"]
        longest = max(longest, len(content.encode()), len(normalize(content).encode()))
    return longest


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a possibly nested sequence."""
    if step is not None and step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    elif step is not None:
        yield step


def _normalizer_keeps(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(old.encode()) <= len(step["content"].encode())
    return step["type"] == "Prepend"


def _pre_tokenizer_keeps(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _post_processor_keeps(step: Mapping[str, Any]) -> bool:
    if step["type"] == "TemplateProcessing":
        return any(piece.get("Sequence", {}).get("id") == "A" for piece in step["single"])
    return step["type"] in _KEEPING_POST_PROCESSORS


def _covers_every_byte(model: Mapping[str, Any], byte_level: bool) -> bool:
    """Whether any text has tokens of its own, so that nothing is skipped or becomes unknown."""
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if byte_level:
        return model["vocab"].keys() >= BYTE_OF_CHAR.keys()
    return model["byte_fallback"] and model["vocab"].keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
