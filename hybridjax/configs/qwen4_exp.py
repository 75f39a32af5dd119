"""The configuration of Qwen3.8-Flash-Next (Qwen4Exp): the text fields of its released ``config.json``.

Source: qwen4_exp 1; defaults are the released model's. The multimodal wrapper is in qwen4_exp_multimodal.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybridjax.configs.frozen_dict import FrozenDict
from hybridjax.configs.validation import check, finite_floats, positive_int, take, token_ids_and_dtype
from hybridjax.errors import ConfigError

LINEAR = "linear_attention"
INDEXED = "indexed_attention"

PAGE_SIZE = 64  # tokens per K/V page; a whole number of index blocks

_LAYER_ALIASES = {
    LINEAR: LINEAR,
    INDEXED: INDEXED,
    "full_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """``rope_parameters`` in config.json: partial, interleaved multimodal rotary embedding."""

    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, ...] = (11, 11, 10)
    mrope_interleaved: bool = True
    rope_type: str = "default"

    def __post_init__(self):
        finite_floats(self, "rope_parameters.")
        check(self.rope_theta > 0, "rope_parameters.rope_theta", self.rope_theta, "above 0")
        check(self.rope_type == "default", "rope_parameters.rope_type", self.rope_type, "'default'")
        check(
            0 < self.partial_rotary_factor <= 1,
            "rope_parameters.partial_rotary_factor",
            self.partial_rotary_factor,
            "in (0, 1]",
        )
        check(
            len(self.mrope_section) == 3 and all(type(n) is int and n >= 0 for n in self.mrope_section),
            "rope_parameters.mrope_section",
            self.mrope_section,
            "three sizes: temporal, vertical, horizontal",
        )
        interleaved = self.mrope_interleaved
        check(interleaved is True, "rope_parameters.mrope_interleaved", interleaved, "true")


@dataclasses.dataclass(frozen=True)
class Qwen4ExpConfig:
    """A text model. Lengths are in tokens, sizes in elements; qwen4_exp 1 has the table of fields.

    ``ple_layer_ids`` counts layers from one, as the released file does; ``ple_layers`` from zero.
    ``extra`` holds the fields of a config.json that mean nothing here, so that saving keeps them.
    """

    vocab_size: int = 248320
    hidden_size: int = 2560
    num_hidden_layers: int = 48
    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    head_dim: int = 256
    attention_bias: bool = False
    rope_parameters: RopeConfig = RopeConfig()
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    output_gate_type: str | None = "sigmoid"
    layer_types: tuple[str, ...] = (LINEAR, LINEAR, LINEAR, INDEXED) * 12
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 48
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 640
    shared_expert_intermediate_size: int = 640
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001
    hc_count: int = 4
    hc_lowrank: int = 320
    ple_layer_ids: tuple[int, ...] = (2,)
    ple_embed_dim: int = 2560
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20000000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 128
    seed: int = 1234
    indexer_n_heads: int = 4
    indexer_kv_heads: int = 1
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    mtp_num_hidden_layers: int = 1
    mtp_use_dedicated_embeddings: bool = False
    bos_token_id: int | None = 248044
    eos_token_id: tuple[int, ...] = (248044,)
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    extra: Mapping[str, Any] = FrozenDict()

    architecture = "Qwen4ExpForCausalLM"
    model_type = "qwen4_exp_text"

    def __post_init__(self):
        object.__setattr__(self, "extra", FrozenDict(self.extra))
        finite_floats(self)
        for name in _POSITIVE:
            positive_int(name, getattr(self, name), *_AT_MOST.get(name, ()))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        check(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        check(values % keys == 0, "linear_num_value_heads", values, f"a multiple of {keys} key heads")
        check(self.hidden_act == "silu", "hidden_act", self.hidden_act, "'silu'")
        gate = self.output_gate_type
        check(gate in (None, "silu", "swish", "sigmoid"), "output_gate_type", gate, "null, silu or sigmoid")
        check(0 < self.rms_norm_eps < 1, "rms_norm_eps", self.rms_norm_eps, "between 0 and 1")
        for name in ("initializer_range", "router_aux_loss_coef"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        self._check_layers()
        self._check_indexer()
        if self.ple_layer_ids:
            self._check_ngrams()
        experts = self.num_experts
        check(self.num_experts_per_tok <= experts, "num_experts_per_tok", self.num_experts_per_tok,
              f"at most num_experts ({experts})")  # fmt: skip
        check(self.hc_count > 1, "hc_count", self.hc_count, "2 or more")
        mtp = self.mtp_num_hidden_layers
        check(mtp in (0, 1), "mtp_num_hidden_layers", mtp, "0 or 1")
        dedicated = self.mtp_use_dedicated_embeddings
        check(dedicated is False, "mtp_use_dedicated_embeddings", dedicated, "false")
        token_ids_and_dtype(self)

    def _check_layers(self):
        count = self.num_hidden_layers
        check(len(self.layer_types) == count, "layer_types", f"{len(self.layer_types)} entries",
              f"one entry per layer ({count})")  # fmt: skip
        for i, kind in enumerate(self.layer_types):
            check(kind in (LINEAR, INDEXED), f"layer_types[{i}]", kind, f"{LINEAR!r} or {INDEXED!r}")

    def _check_indexer(self):
        ratio, width = self.indexer_compress_ratio, self.indexer_head_dim
        check(self.indexer_kv_heads == 1, "indexer_kv_heads", self.indexer_kv_heads, "1")
        check(ratio >= 2 and PAGE_SIZE % ratio == 0, "indexer_compress_ratio", ratio,
              f"2 or more and a divisor of the page size ({PAGE_SIZE})")  # fmt: skip
        check(self.indexer_budget % ratio == 0, "indexer_budget", self.indexer_budget,
              f"a multiple of indexer_compress_ratio ({ratio})")  # fmt: skip
        rotary = self.rotary_dim
        factor = self.rope_parameters.partial_rotary_factor
        check(rotary % 2 == 0 and 0 < rotary <= self.head_dim, "rope_parameters.partial_rotary_factor",
              factor, "such that an even number of dimensions turns")  # fmt: skip
        check(rotary <= width, "indexer_head_dim", width, f"at least the {rotary} rotary dimensions")
        section = self.rope_parameters.mrope_section
        check(sum(section) == rotary // 2, "rope_parameters.mrope_section", section,
              f"three sizes that add up to {rotary // 2}, half the rotary dimensions")  # fmt: skip

    def _check_ngrams(self):
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        check(self.ngram_size >= 2, "ngram_size", self.ngram_size, "2 or more")
        reach = (self.ple_conv_kernel_size - 1) * self.ngram_size
        check(reach <= 64, "ple_conv_kernel_size", self.ple_conv_kernel_size,
              f"such that (ple_conv_kernel_size - 1) * ngram_size ({reach}) is at most 64")  # fmt: skip
        check(self.ple_embed_dim % heads == 0, "ple_embed_dim", self.ple_embed_dim,
              f"a multiple of (ngram_size - 1) * heads_per_ngram ({heads})")  # fmt: skip
        check(bool(self.eos_token_id), "eos_token_id", None, "set when ple_layer_ids is not empty")
        for number in self.ple_layer_ids:
            check(type(number) is int and 1 <= number <= self.num_hidden_layers, "ple_layer_ids", number,
                  f"in 1..{self.num_hidden_layers}, counted from one")  # fmt: skip
            kind = self.layer_types[number - 1]
            check(kind == LINEAR, "ple_layer_ids", number, f"the number of a {LINEAR} layer")

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated (64 of 256 in the release)."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def ple_layers(self) -> tuple[int, ...]:
        """Zero-based indices of the layers with an n-gram embedding, ascending."""
        return tuple(number - 1 for number in sorted(set(self.ple_layer_ids)))

    @property
    def gate_activation(self) -> str:
        """Activation of the Gated DeltaNet output gate: 'silu' or 'sigmoid'."""
        return "sigmoid" if self.output_gate_type == "sigmoid" else "silu"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Qwen4ExpConfig":
        """Reads a released ``config.json`` (text part). Raises ConfigError naming the field at fault."""
        raw = dict(raw)
        for name, allowed in _FIXED.items():
            if raw.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{name} is {raw[name]!r}; supported: {', '.join(map(repr, allowed))}")
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in raw and field.name not in _STRUCTURED:
                fields[field.name] = take(raw, field.name, field.type)
        for name, missing in _CLASS_DEFAULTS.items():
            fields.setdefault(name, missing)
        fields.setdefault("ple_embed_dim", fields.get("hidden_size", cls.hidden_size))
        fields["rope_parameters"] = _rope(raw)
        layers = fields.get("num_hidden_layers", cls.num_hidden_layers)
        fields["layer_types"] = _layer_types(raw, layers)
        fields["ple_layer_ids"] = _ints(raw, "ple_layer_ids")
        fields["eos_token_id"] = _ints(raw, "eos_token_id")
        fields["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or cls.dtype).removeprefix("torch.")
        known = cls(**fields)
        written = known.to_dict()
        ignored = written.keys() | {"torch_dtype", "auto_map", "rope_theta", "partial_rotary_factor"}
        extra = {name: value for name, value in raw.items() if name not in ignored}
        return dataclasses.replace(known, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` that transformers reads."""
        out = dataclasses.asdict(self)
        extra = dict(out.pop("extra"))
        for name in ("layer_types", "ple_layer_ids"):
            out[name] = list(out[name])
        out["rope_parameters"]["mrope_section"] = list(self.rope_parameters.mrope_section)
        eos = list(self.eos_token_id)
        out["eos_token_id"] = eos[0] if len(eos) == 1 else (eos or None)
        out = {"architectures": [self.architecture], "model_type": self.model_type, **out}
        out["attention_dropout"] = 0.0
        return out | {name: value for name, value in extra.items() if name not in out}


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "hc_count",
    "hc_lowrank", "ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram",
    "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts", "indexer_n_heads",
    "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip

# Work and memory grow with these before any tensor has been seen.
_AT_MOST = {"num_experts": (8192,), "num_hidden_layers": (4096,), "ple_conv_kernel_size": (32,),
            "linear_conv_kernel_dim": (64,), "ngram_size": (16,), "heads_per_ngram": (1024,)}  # fmt: skip

_STRUCTURED = ("rope_parameters", "layer_types", "ple_layer_ids", "eos_token_id", "dtype", "extra")

# What a file that leaves a field out means, where the released model says otherwise.
_CLASS_DEFAULTS: dict[str, Any] = {
    "output_gate_type": None,
    "split_ngram_parts": 512,
    "mtp_num_hidden_layers": 0,
    "bos_token_id": None,
}

_FIXED = {"attention_dropout": (0.0, 0), "mamba_ssm_dtype": ("float32",)}


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    given = raw.get("rope_parameters", raw.get("rope_scaling")) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters is {given!r}; allowed: an object")
    given = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw} | dict(given)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(RopeConfig):
        if field.name == "mrope_section" and field.name in given:
            fields[field.name] = _ints(given, field.name)
        elif field.name in given:
            fields[field.name] = take(given, field.name, field.type, prefix="rope_parameters.")
    return RopeConfig(**fields)


def _layer_types(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    check(type(layers) is int and 0 < layers <= 4096, "num_hidden_layers", layers, "in 1..4096")
    value = raw.get("layer_types")
    if value is None:
        interval = raw.get("full_attention_interval", 4)
        positive_int("full_attention_interval", interval)
        return tuple(INDEXED if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if not isinstance(value, list | tuple):
        raise ConfigError(f"layer_types is {value!r}; allowed: a list of layer names")
    for i, name in enumerate(value):
        if not isinstance(name, str) or name not in _LAYER_ALIASES:
            raise ConfigError(f"layer_types[{i}] is {name!r}; allowed: {', '.join(sorted(_LAYER_ALIASES))}")
    return tuple(_LAYER_ALIASES[name] for name in value)


def _ints(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of integers from a list, one integer or null."""
    value = raw.get(name)
    value = [] if value is None else [value] if type(value) is int else value
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise ConfigError(f"{name} is {value!r}; allowed: an integer, a list of integers or null")
    return tuple(value)
