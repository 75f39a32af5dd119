"""A tokenizer as llguidance is to see it."""

import json
from typing import Any


def without_special_texts(serialized: str) -> str:
    """tokenizer.json in which no text spells a special token.

    llguidance tokenizes what a grammar prescribes; a prescribed ``</s>`` is text, not the end of it. Special
    tokens keep their ids under names that do not occur in text.
    """
    spec: dict[str, Any] = json.loads(serialized)
    names = {}
    for token in spec.get("added_tokens") or ():
        if token["special"]:
            names[token["content"]] = token["content"] = f"\U0010ffff{token['id']}"
    model = spec["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = None  # it only adds special tokens around a text
    return json.dumps(spec, ensure_ascii=False)
