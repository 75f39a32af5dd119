"""What structured output costs: compiling a grammar, a mask over a large vocabulary, a masked token.

python -m benchmarks.structured_output [--vocab 248320] [--tokenizer tokenizer.json]
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from benchmarks.common import finish, times
from hybridjax.checkpoints import resolve
from hybridjax.ops.sampling import init_sampler_state, neutral_rows, sample, write_masks
from hybridjax.serving import Engine, SamplingParams
from hybridjax.serving.api import Grammar
from hybridjax.structured import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
EBNF = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? ws "}"
array ::= "[" ws (value ("," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? [0-9]{1,9} ("." [0-9]{1,9})?
ws ::= [ \n]{0,8}
"""
GRAMMARS = {
    "schema": ("json_schema", json.dumps(SCHEMA)),
    "any object": ("json_object", ""),
    "regex": ("regex", r"[A-Z][a-z]{1,20}( [A-Z][a-z]{1,20}){0,3}, \d{4}-\d{2}-\d{2}"),
    "ebnf": ("ebnf", EBNF),
}


class Words:
    """A byte-level tokenizer with as many tokens as wanted: tiny-sala's, then pairs of tokens."""

    has_token_bytes = True

    def __init__(self, vocab: int, path: str | None):
        file = path or str(resolve("tiny-sala") / "tokenizer.json")
        self._spec = json.loads(tokenizers.Tokenizer.from_file(file).to_str())
        known, merges = self._spec["model"]["vocab"], self._spec["model"]["merges"]
        special = {token["content"] for token in self._spec["added_tokens"]}
        texts = [token for token in known if token not in special]
        draw = random.Random(0)
        while not path and len(known) < vocab:
            left, right = draw.choice(texts), draw.choice(texts)
            if len(left + right) < 16 and known.setdefault(left + right, len(known)) == len(known) - 1:
                merges.append([left, right])
        self.id_limit = max([*known.values(), *(token["id"] for token in self._spec["added_tokens"])]) + 1

    def serialized(self) -> str:
        return json.dumps(self._spec)


def masks(compiler: GrammarCompiler, kind: str, source: str, eos: set[int]) -> dict[str, Any]:
    """Seconds of compiling, of a copy, and of each mask along random walks."""
    start = time.perf_counter()
    compiler.matcher(kind, source)
    cold = time.perf_counter() - start
    copy = times(lambda: compiler.matcher(kind, source), 20)["median"]
    draw, took, sizes = random.Random(1), [], []
    for _ in range(8):
        matcher = compiler.matcher(kind, source)
        for _ in range(60):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            sizes.append(len(allowed))
            inside = [token for token in allowed.tolist() if token not in eos]
            if not inside:
                break
            start = time.perf_counter()
            matcher.accept(draw.choice(inside))
            if matcher.is_complete:
                break
            matcher.mask()
            took.append(time.perf_counter() - start)
    took.sort()
    return {
        "compile": cold,
        "copy": copy,
        "mask_median": took[len(took) // 2],
        "mask_p99": took[len(took) * 99 // 100],
        "mask_most": took[-1],
        "tokens": len(took),
        "allowed_median": int(np.median(sizes)),
    }


def sampling(vocab: int, rows: int) -> dict[str, float]:
    """Seconds of sampling on the device, with and without masks, and of writing the masks."""
    state = init_sampler_state(rows + 1, vocab)
    logits = jax.random.normal(jax.random.key(0), (rows, vocab))
    slots, zeros = jnp.arange(1, rows + 1), jnp.zeros(rows, jnp.int32)
    stops = jnp.full((rows, 8), -1, jnp.int32)
    run, out = jax.jit(sample), {}
    for name, heat, masked in (
        ("greedy", 0.0, 0),
        ("greedy, one masked", 0.0, 1),
        ("sampled", 1.0, 0),
        ("sampled, one masked", 1.0, 1),
        ("sampled, all masked", 1.0, rows),
    ):
        settings = dataclasses.replace(
            neutral_rows(rows),
            use_mask=jnp.arange(rows) < masked,
            temperature=jnp.full(rows, heat, jnp.float32),
        )
        inputs = logits, settings, state, slots, zeros, stops, zeros
        out[name] = times(lambda x=inputs: jax.block_until_ready(run(*x)), 10)["median"]
    words = np.ones((rows, state.token_mask.shape[1]), np.uint32)
    write = jax.jit(write_masks)
    out["write"] = times(lambda: write(state.token_mask, slots, words).block_until_ready(), 10)["median"]
    return out


def tokens(rows: int) -> dict[str, float]:
    """Seconds per token of tiny-sala, by the text's form; each row decodes 128 tokens."""
    out = {}
    fields = {"context_length": 512, "max_running_requests": rows, "num_continuous_decode_steps": 1}
    with Engine("tiny-sala", **fields) as one:
        for name, grammar in (("free", None), ("regex", Grammar("regex", r"([a-z ]{1,9}\n)*"))):
            params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True, grammar=grammar)
            out[name] = times(lambda p=params: one.generate(["import"] * rows, p), 5)["median"] / 128
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--tokenizer", help="a byte-level tokenizer.json instead of a made-up one")
    args = parser.parse_args()
    words, out = Words(args.vocab, args.tokenizer), []
    eos = (2, 4) if args.tokenizer is None else (1,)
    start = time.perf_counter()
    compiler = GrammarCompiler(words, words.id_limit, eos)
    compiler.warm()
    print(f"{words.id_limit} tokens, ready after {time.perf_counter() - start:.2f} s")
    for name, (kind, source) in GRAMMARS.items():
        row = {"what": "mask", "grammar": name} | masks(compiler, kind, source, set(eos))
        print(row, flush=True)
        out.append(row)
    compiler.close()
    for rows in (1, 8):
        out.append({"what": "sampling", "rows": rows} | sampling(words.id_limit, rows))
        print(out[-1], flush=True)
    for rows in (1, 4):
        out.append({"what": "token", "rows": rows} | tokens(rows))
        print(out[-1], flush=True)
    finish("structured_output", out, vocab=words.id_limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
