"""The configuration of MiniCPM-SALA: the fields of its released ``config.json``.

Source: openbmb/MiniCPM-SALA, revision 9180fe1d. Defaults are the released 9B model.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hybridjax.configs.frozen_dict import FrozenDict
from hybridjax.configs.validation import check, finite_floats, positive_int, take, token_ids_and_dtype
from hybridjax.errors import ConfigError

SPARSE = "minicpm4"
LINEAR = "lightning-attn"

_MIXER_ALIASES = {
    "minicpm4": SPARSE,
    "minicpm": SPARSE,
    "standard": SPARSE,
    "attention": SPARSE,
    "attn": SPARSE,
    "lightning-attn": LINEAR,
    "lightning": LINEAR,
    "lightning_attn": LINEAR,
}
_RELEASED_SPARSE_LAYERS = (0, 9, 16, 17, 22, 29, 30, 31)


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """InfLLM-v2 block selection (``sparse_config`` in config.json).

    A query at position q attends densely while q + 1 < dense_len; later it attends to
    ``topk + window_size // block_size`` blocks of ``block_size`` tokens: the first ``init_blocks``,
    the blocks qb - window_size // block_size .. qb, and the best scored of the rest.
    """

    block_size: int = 64
    dense_len: int = 8192
    init_blocks: int = 1
    kernel_size: int = 32
    kernel_stride: int = 16
    topk: int = 64
    window_size: int = 2048

    def __post_init__(self):
        for name, size in (("block_size", 64), ("kernel_size", 32), ("kernel_stride", 16)):
            check(
                getattr(self, name) == size,
                f"sparse_config.{name}",
                getattr(self, name),
                f"{size}; the implementation works on 64-token tiles",
            )
        for name in ("topk", "window_size"):
            positive_int(f"sparse_config.{name}", getattr(self, name))
        for name in ("dense_len", "init_blocks"):
            check(getattr(self, name) >= 0, f"sparse_config.{name}", getattr(self, name), "0 or more")
        check(
            self.window_size % self.block_size == 0,
            "sparse_config.window_size",
            self.window_size,
            f"a multiple of block_size ({self.block_size})",
        )
        check(
            self.init_blocks + self.local_blocks + 1 <= self.selected_blocks,
            "sparse_config.topk",
            self.topk,
            f"at least init_blocks + 1 ({self.init_blocks + 1}), so that every forced block fits",
        )

    @property
    def local_blocks(self) -> int:
        return self.window_size // self.block_size

    @property
    def selected_blocks(self) -> int:
        """Blocks that a sparse query attends to (96 in the release)."""
        return self.topk + self.local_blocks

    @property
    def max_listed_blocks(self) -> int:
        """The longest block list of any query, dense ones included."""
        return max(self.selected_blocks, -(-self.dense_len // self.block_size))


@dataclasses.dataclass(frozen=True)
class MiniCPMSALAConfig:
    """See the field table in the module's source. Lengths are in tokens, sizes in elements.

    ``extra`` holds the fields of a config.json that mean nothing here, so that saving a loaded model
    keeps them; those of its ``sparse_config`` are under that name. ``auto_map`` is never kept: it names
    code that comes with a checkpoint and that other tools would run.
    """

    vocab_size: int = 73448
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    lightning_nh: int = 32
    lightning_nkv: int = 32
    lightning_head_dim: int = 128
    lightning_scale: str | float = "1/sqrt(d)"
    lightning_use_rope: bool = True
    attn_use_rope: bool = False
    qk_norm: bool = True
    use_output_norm: bool = True
    use_output_gate: bool = True
    attn_use_output_gate: bool = True
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 524288
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 256
    initializer_range: float = 0.1
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: tuple[int, ...] = (2, 73440)
    pad_token_id: int | None = 2
    mixer_types: tuple[str, ...] = tuple(
        SPARSE if i in _RELEASED_SPARSE_LAYERS else LINEAR for i in range(32)
    )
    sparse_config: SparseConfig = SparseConfig()
    dtype: str = "bfloat16"
    # "position": a query is answered as a decode step would (docs/design.md). "call": the released
    # code's rule, by the length of the whole call; teacher-forced calls only.
    dense_switch: str = "position"
    extra: Mapping[str, Any] = FrozenDict()

    architecture = "MiniCPMSALAForCausalLM"
    model_type = "minicpm_sala"

    def __post_init__(self):
        object.__setattr__(self, "extra", FrozenDict(self.extra))
        finite_floats(self)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "lightning_nh",
            "lightning_nkv",
            "lightning_head_dim",
            "max_position_embeddings",
            "dim_model_base",
        ):
            positive_int(name, getattr(self, name))
        check(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads ({self.num_attention_heads})",
        )
        check(
            self.lightning_nh == self.lightning_nkv,
            "lightning_nkv",
            self.lightning_nkv,
            f"equal to lightning_nh ({self.lightning_nh})",
        )
        check(self.hidden_act == "silu", "hidden_act", self.hidden_act, "'silu'")
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        check(self.lightning_head_dim % 2 == 0, "lightning_head_dim", self.lightning_head_dim, "even")
        check(0 < self.rms_norm_eps < 1, "rms_norm_eps", self.rms_norm_eps, "between 0 and 1")
        for name in ("rope_theta", "initializer_range"):
            check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        check(
            len(self.mixer_types) == self.num_hidden_layers,
            "mixer_types",
            f"{len(self.mixer_types)} entries",
            f"one entry per layer ({self.num_hidden_layers})",
        )
        for i, kind in enumerate(self.mixer_types):
            check(kind in (SPARSE, LINEAR), f"mixer_types[{i}]", kind, f"{SPARSE!r} or {LINEAR!r}")
        token_ids_and_dtype(self)
        check(
            self.dense_switch in ("position", "call"), "dense_switch", self.dense_switch, "position or call"
        )
        _ = self.lightning_scale_value

    @property
    def lightning_scale_value(self) -> float:
        """The factor on q . k in the linear layers."""
        if isinstance(self.lightning_scale, str):
            named = {"1/sqrt(d)": self.lightning_head_dim**-0.5, "1/d": 1.0 / self.lightning_head_dim}
            if self.lightning_scale not in named:
                raise ConfigError(
                    f"lightning_scale is {self.lightning_scale!r}; allowed: '1/sqrt(d)', '1/d' or a number"
                )
            return named[self.lightning_scale]
        return float(self.lightning_scale)

    @property
    def residual_scale(self) -> float:
        """Factor on every sublayer's output (muP depth scaling)."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_divisor(self) -> float:
        """What the final hidden state is divided by before lm_head (muP width scaling)."""
        return self.hidden_size / self.dim_model_base

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "MiniCPMSALAConfig":
        """Reads a released ``config.json``. Raises ConfigError naming the field at fault."""
        raw = dict(raw)
        for name, allowed in _FIXED.items():
            if raw.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{name} is {raw[name]!r}; supported: {', '.join(map(repr, allowed))}")
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in ("mixer_types", "sparse_config", "eos_token_id", "dtype", "extra"):
                continue
            if field.name in raw:
                fields[field.name] = take(raw, field.name, field.type)
        layers = fields.get("num_hidden_layers", cls.num_hidden_layers)
        if "mixer_types" not in raw:
            raise ConfigError("mixer_types is missing; it must list the mixer of each layer")
        fields["mixer_types"] = _mixer_types(raw["mixer_types"], layers)
        eos = raw.get("eos_token_id", list(cls.eos_token_id))
        eos = [eos] if isinstance(eos, int) else ([] if eos is None else eos)
        if not isinstance(eos, list | tuple) or not all(type(e) is int for e in eos):
            raise ConfigError(f"eos_token_id is {eos!r}; allowed: an integer, a list of integers or null")
        fields["eos_token_id"] = tuple(eos)
        fields["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or cls.dtype).removeprefix("torch.")
        sparse = raw.get("sparse_config")
        if sparse is None:
            # No sparse_config: the released code attends densely everywhere.
            horizon = fields.get("max_position_embeddings", cls.max_position_embeddings) + 1
            fields["sparse_config"] = SparseConfig(dense_len=horizon)
        elif isinstance(sparse, Mapping):
            fields["sparse_config"] = SparseConfig(
                **{
                    f.name: take(sparse, f.name, f.type, prefix="sparse_config.")
                    for f in dataclasses.fields(SparseConfig)
                    if f.name in sparse
                }
            )
        else:
            raise ConfigError(f"sparse_config is {sparse!r}; allowed: an object or null")
        known = cls(**fields)
        return dataclasses.replace(known, extra=_unknown(raw, known.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` that the released code reads."""
        out = dataclasses.asdict(self)
        extra = dict(out.pop("extra"))
        dtype = out.pop("dtype")
        if out["dense_switch"] == "position":
            del out["dense_switch"]
        out["mixer_types"] = list(self.mixer_types)
        out["eos_token_id"] = list(self.eos_token_id)
        sparse = {"use_nope": False, **extra.pop("sparse_config", {})}
        out["sparse_config"] = sparse | out["sparse_config"]
        out = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **out,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_scaling": None,
            **_UNUSED,
            "torch_dtype": dtype,
        }
        return out | {name: value for name, value in extra.items() if name in _UNUSED or name not in out}


# Fields that the released code has and that mean nothing here, with its defaults.
_UNUSED = {"mup_denominator": 32, "use_cache": True}

# Fields that exist in released configs and have one supported meaning.
_FIXED = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "rope_scaling": (None,),
    "lightning_layerwise_decay": (False,),
}


def _unknown(raw: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """What ``raw`` says beyond ``written``, which is what its known fields make of it."""
    known = written.keys() | {"dtype", "dense_switch", "auto_map"}
    extra = {k: v for k, v in raw.items() if k not in known or (k in _UNUSED and v != _UNUSED[k])}
    sparse = {
        k: v
        for k, v in (raw.get("sparse_config") or {}).items()
        if k not in written["sparse_config"] or (k == "use_nope" and v is not False)
    }
    return extra | ({"sparse_config": sparse} if sparse else {})


def _mixer_types(value: Any, layers: int) -> tuple[str, ...]:
    """Resolves aliases; a short list is tiled over the layers, as SGLang does."""
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"mixer_types is {value!r}; allowed: a non-empty list of mixer names")
    names = []
    for i, name in enumerate(value):
        if not isinstance(name, str) or name not in _MIXER_ALIASES:
            raise ConfigError(f"mixer_types[{i}] is {name!r}; allowed: {', '.join(sorted(_MIXER_ALIASES))}")
        names.append(_MIXER_ALIASES[name])
    check(type(layers) is int and 0 < layers <= 4096, "num_hidden_layers", layers, "in 1..4096")
    if len(names) > layers:
        raise ConfigError(f"mixer_types has {len(names)} entries; num_hidden_layers is {layers}")
    return tuple(names[i % len(names)] for i in range(layers))
