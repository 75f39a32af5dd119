"""Walks through a grammar's masks, without a model."""

import random

import numpy as np

from hybridjax.structured import Matcher

EOS = (2, 4)  # of tiny-sala


def allowed(matcher: Matcher) -> list[int]:
    """The tokens of the matcher's mask."""
    return np.nonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))[0].tolist()


def byte_tokens(tokenizer) -> dict[int, int]:
    """byte -> the token that stands for it alone."""
    return {
        tokenizer.token_bytes(i)[0]: i
        for i in range(tokenizer.id_limit)
        if len(tokenizer.token_bytes(i)) == 1 and i not in tokenizer.special_ids
    }


def accepts(matcher: Matcher, text: str, tokenizer) -> bool:
    """Whether the text, spelt in bytes, is a whole sentence of the grammar."""
    state = matcher._state  # masks insist on the usual spelling, so the bytes are tried directly
    if not all(state.consume_token(byte_tokens(tokenizer)[byte]) for byte in text.encode()):
        return False
    return state.is_accepting()


def walk(matcher: Matcher, seed: int, most: int = 200) -> tuple[list[int], bool]:
    """Random allowed tokens until the grammar ends; whether it did, and was not cut after ``most``."""
    draw, tokens = random.Random(seed), []
    while len(tokens) < most:
        if matcher.is_complete:
            return tokens, True
        token = draw.choice(allowed(matcher))
        if token in EOS:
            return tokens, True
        matcher.accept(token)
        tokens.append(token)
    return tokens, matcher.is_complete
