"""Which weights quantisation leaves as they are.

Routers, gates and indexers decide between things, and small changes of theirs are no small errors. The names
are those that released NVFP4 checkpoints leave out (qwen4_exp 2.4), as far as a model has them.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

_KEPT: Mapping[str, tuple[str, ...]] = {
    "MiniCPMSALA": ("model.embed_tokens", "lm_head"),
    "Qwen4Exp": (
        "*.embed_tokens",
        "lm_head",
        "mtp.*",
        "model.visual.*",
        "*.mlp.gate",
        "*.mlp.shared_expert_gate",
        "*hyper_connection*",
        "*.ple.*",
        "*.self_attn.indexer.*",
        "*.linear_attn.in_proj_a",
        "*.linear_attn.in_proj_b",
    ),
}


def kept_precise(model: Any) -> tuple[str, ...]:
    """The patterns (fnmatch) of a model's tensors or modules that are not quantised unless asked for."""
    for kind in type(model).__mro__:
        if kind.__name__ in _KEPT:
            return _KEPT[kind.__name__]
    return ("*embed_tokens", "lm_head")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is that of a tensor or of the module that it is the weight of."""
    module = name.removesuffix(".weight")
    return any(fnmatch.fnmatchcase(item, pattern) for pattern in patterns for item in (name, module))
