"""The multimodal Qwen3.8-Flash-Next: the whole released ``config.json``, text and vision together.

Source: qwen4_exp 1 and 11; defaults are the released model's.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hybridjax.configs.frozen_dict import FrozenDict
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.configs.validation import check, finite_floats, positive_int, take
from hybridjax.errors import ConfigError

_VISION = "vision_config."
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclasses.dataclass(frozen=True)
class Qwen4ExpVisionConfig:
    """The vision tower. Sizes are in elements, patches in pixels.

    ``num_position_embeddings`` is the area of a square learned grid; ``rope_theta`` the base of the axial
    rotary frequencies. ``extra`` holds the fields of a config.json that mean nothing here.
    """

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 2560
    num_position_embeddings: int = 2304
    hidden_act: str = "gelu_pytorch_tanh"
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    extra: Mapping[str, Any] = FrozenDict()

    model_type = "qwen4_exp_vision"

    def __post_init__(self):
        object.__setattr__(self, "extra", FrozenDict(self.extra))
        finite_floats(self, _VISION)
        for field in dataclasses.fields(self):
            if field.type is int:
                positive_int(_VISION + field.name, getattr(self, field.name))
        # Layers are made one by one before any tensor has been seen.
        check(self.depth <= 1024, _VISION + "depth", self.depth, "at most 1024")
        hidden, heads = self.hidden_size, self.num_heads
        check(hidden % heads == 0, _VISION + "num_heads", heads, f"a divisor of hidden_size ({hidden})")
        check(self.head_dim % 4 == 0, _VISION + "num_heads", heads,
              f"such that hidden_size / num_heads ({self.head_dim}) is a multiple of 4")  # fmt: skip
        check(self.in_channels == 3, _VISION + "in_channels", self.in_channels, "3: images are RGB")
        grid = self.num_position_embeddings
        check(self.grid_side**2 == grid, _VISION + "num_position_embeddings", grid, "the square of a number")
        act = self.hidden_act
        check(act == "gelu_pytorch_tanh", _VISION + "hidden_act", act, "'gelu_pytorch_tanh'")
        check(self.rope_theta > 0, _VISION + "rope_parameters.rope_theta", self.rope_theta, "above 0")
        spread = self.initializer_range
        check(spread >= 0, _VISION + "initializer_range", spread, "0 or more")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid_side(self) -> int:
        """Rows and columns of the learned position grid."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_values(self) -> int:
        """Values of one flattened patch: channels * frames * patch_size^2."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches that become one token of the language model."""
        return self.spatial_merge_size**2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Qwen4ExpVisionConfig":
        """Reads ``vision_config``. Raises ConfigError naming the field at fault."""
        _fixed(raw, _FIXED_VISION, _VISION)
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in raw and field.name != "extra":
                fields[field.name] = take(raw, field.name, field.type, prefix=_VISION)
        # What a file that leaves the field out means; the released model says otherwise.
        fields.setdefault("out_hidden_size", 3584)
        rope = raw.get("rope_parameters")
        if not isinstance(rope, Mapping | None):
            raise ConfigError(f"{_VISION}rope_parameters is {rope!r}; allowed: an object")
        if rope:
            _fixed(rope, {"rope_type": ("axial",)}, _VISION + "rope_parameters.")
            if "rope_theta" in rope:
                fields["rope_theta"] = take(rope, "rope_theta", float, prefix=_VISION + "rope_parameters.")
        known = cls(**fields)
        ignored = known.to_dict().keys() | {"rope_theta"}
        return dataclasses.replace(known, extra={k: v for k, v in raw.items() if k not in ignored})

    def to_dict(self) -> dict[str, Any]:
        """``vision_config`` as transformers reads it."""
        out = dataclasses.asdict(self)
        extra = dict(out.pop("extra"))
        out["rope_parameters"] = {"rope_theta": out.pop("rope_theta"), "rope_type": "axial"}
        out["model_type"] = self.model_type
        return out | {name: value for name, value in extra.items() if name not in out}


@dataclasses.dataclass(frozen=True)
class Qwen4ExpMultimodalConfig:
    """A text model and a vision tower. What the engine asks of any config is answered by the text model.

    ``extra`` holds the fields of a config.json that mean nothing here, so that saving keeps them.
    """

    text_config: Qwen4ExpConfig = Qwen4ExpConfig()
    vision_config: Qwen4ExpVisionConfig = Qwen4ExpVisionConfig()
    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_start_token_id: int = 248053
    vision_end_token_id: int = 248054
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    extra: Mapping[str, Any] = FrozenDict()

    architecture = "Qwen4ExpForConditionalGeneration"
    model_type = "qwen4_exp"

    def __post_init__(self):
        object.__setattr__(self, "extra", FrozenDict(self.extra))
        text, vision = self.text_config, self.vision_config
        wide = vision.out_hidden_size
        check(wide == text.hidden_size, _VISION + "out_hidden_size", wide,
              f"text_config.hidden_size ({text.hidden_size})")  # fmt: skip
        seen: dict[int, str] = {}
        for name in _TOKENS:
            token = getattr(self, name)
            check(type(token) is int and 0 <= token < text.vocab_size, name, token,
                  f"in 0..{text.vocab_size - 1}")  # fmt: skip
            check(token not in seen, name, token, f"different from {seen.get(token)}")
            seen[token] = name
        for token in text.eos_token_id:
            check(token not in seen, "text_config.eos_token_id", token, f"different from {seen.get(token)}")
        tied = self.tie_word_embeddings
        check(tied == text.tie_word_embeddings, "tie_word_embeddings", tied,
              f"that of text_config ({text.tie_word_embeddings})")  # fmt: skip
        check(self.dtype == text.dtype, "dtype", self.dtype, f"that of text_config ({text.dtype})")

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.text_config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int:
        return self.text_config.max_position_embeddings

    @property
    def bos_token_id(self) -> int | None:
        return self.text_config.bos_token_id

    @property
    def eos_token_id(self) -> tuple[int, ...]:
        return self.text_config.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self.text_config.pad_token_id

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Qwen4ExpMultimodalConfig":
        """Reads a released ``config.json``. Raises ConfigError naming the field at fault.

        ``dtype`` and ``tie_word_embeddings`` hold for the whole model: those of the file itself come
        before those of its text_config.
        """
        raw = dict(raw)
        text, vision = (dict(_object(raw, name)) for name in ("text_config", "vision_config"))
        _fixed(text, {"model_type": (Qwen4ExpConfig.model_type,)}, "text_config.")
        _fixed(raw, {"model_type": (cls.model_type,)}, "")
        said = [where[name] for where in (raw, text) for name in ("dtype", "torch_dtype")
                if where.get(name) is not None]  # fmt: skip
        dtype = said[0] if said else cls.dtype
        check(isinstance(dtype, str) and dtype != "", "dtype", dtype, "a name such as 'bfloat16' or null")
        fields: dict[str, Any] = {"dtype": dtype.removeprefix("torch.")}
        for name in (*_TOKENS, "tie_word_embeddings"):
            if name in raw:
                fields[name] = take(raw, name, cls.__annotations__[name])
        fields.setdefault("tie_word_embeddings", text.get("tie_word_embeddings", cls.tie_word_embeddings))
        text |= {name: fields[name] for name in ("dtype", "tie_word_embeddings")}
        try:
            fields["text_config"] = Qwen4ExpConfig.from_dict(text)
        except ConfigError as error:
            raise ConfigError(f"text_config: {error}") from None
        fields["vision_config"] = Qwen4ExpVisionConfig.from_dict(vision)
        known = cls(**fields)
        ignored = known.to_dict().keys() | {"torch_dtype", "auto_map"}
        return dataclasses.replace(known, extra={k: v for k, v in raw.items() if k not in ignored})

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` that transformers reads; what the top level says is not said again inside."""
        out: dict[str, Any] = {name: getattr(self, name) for name in _TOKENS}
        text = self.text_config.to_dict()
        for name in ("architectures", "dtype"):
            del text[name]
        if not self.text_config.mtp_num_hidden_layers:
            del text["mtp_num_hidden_layers"], text["mtp_use_dedicated_embeddings"]
        out = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": self.dtype,
            "tie_word_embeddings": self.tie_word_embeddings,
            **out,
            "text_config": text,
            "vision_config": self.vision_config.to_dict(),
        }
        return out | {name: value for name, value in self.extra.items() if name not in out}


_FIXED_VISION: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen4_exp_vision", "qwen4_exp"),
    "deepstack_visual_indexes": ([], (), None),
}


def _fixed(raw: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    """Refuses what is said otherwise than the only way that is supported; not saying it is fine."""
    for name, allowed in fields.items():
        if name in raw and raw[name] not in allowed:
            raise ConfigError(f"{prefix}{name} is {raw[name]!r}; supported: {allowed[0]!r}")


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be an object")
    return value
