"""Experiments: registered functions that return frozen configurations; an ablation replaces one field."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

from hybridjax.configs import MiniCPMSALAConfig, Qwen4ExpConfig, SparseConfig
from hybridjax.configs import qwen4_exp as qwen4
from hybridjax.configs.flags import readable_int
from hybridjax.configs.minicpm_sala import LINEAR, SPARSE
from hybridjax.errors import ConfigError
from hybridjax.registry import Registry
from hybridjax.training.config import DataConfig, ExperimentConfig, ScheduleConfig
from hybridjax.training.tokenizer import BOS, EOS, IM_END

EXPERIMENTS: Registry[Callable[[], ExperimentConfig]] = Registry("experiment")

_TINY_SALA = MiniCPMSALAConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=352,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    lightning_nh=8,
    lightning_nkv=8,
    lightning_head_dim=32,
    max_position_embeddings=4096,
    initializer_range=0.05,
    bos_token_id=BOS,
    eos_token_id=(EOS, IM_END),
    pad_token_id=EOS,
    mixer_types=(SPARSE, LINEAR, LINEAR, SPARSE, LINEAR, LINEAR, LINEAR, SPARSE),
    sparse_config=SparseConfig(topk=8, window_size=256, dense_len=512),
    dtype="bfloat16",
)


@EXPERIMENTS.register("tiny_sala")
def tiny_sala() -> ExperimentConfig:
    """The bundled model: 5.5 M parameters, minutes on one GPU."""
    return ExperimentConfig(
        name="tiny_sala",
        model=_TINY_SALA,
        # Ten passes over the corpus; at twice that the held-out prose gets worse (docs/lab_log.md).
        steps=1600,
        long_share=0.1,
        eval_every=400,
        checkpoint_every=400,
        schedule=ScheduleConfig(warmup_steps=200),
    )


@EXPERIMENTS.register("tiny_sala_debug")
def tiny_sala_debug() -> ExperimentConfig:
    """Three small layers of both kinds: the whole path in minutes on a CPU."""
    model = dataclasses.replace(
        _TINY_SALA,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        lightning_nh=4,
        lightning_nkv=4,
        mixer_types=(SPARSE, LINEAR, SPARSE),
        sparse_config=SparseConfig(topk=2, window_size=64, dense_len=128),
    )
    return ExperimentConfig(
        name="tiny_sala_debug",
        model=model,
        data=DataConfig(evaluation_length=1024, evaluation_documents=6),
        batch_size=8,
        sequence_length=512,
        long_sequence_length=1024,
        long_share=0.1,
        steps=300,
        compute_dtype="float32",
        schedule=ScheduleConfig(warmup_steps=20),
        eval_every=100,
        checkpoint_every=100,
    )


@EXPERIMENTS.register("tiny_sala_dense")
def tiny_sala_dense() -> ExperimentConfig:
    """The same layers with every query dense."""
    return override(tiny_sala(), "name=tiny_sala_dense", "model.sparse_config.dense_len=8192")


@EXPERIMENTS.register("tiny_sala_linear_only")
def tiny_sala_linear_only() -> ExperimentConfig:
    """Linear attention in every layer."""
    return override(tiny_sala(), "name=tiny_sala_linear_only", f"model.mixer_types={','.join([LINEAR] * 8)}")


@EXPERIMENTS.register("tiny_sala_sparse_only")
def tiny_sala_sparse_only() -> ExperimentConfig:
    """Sparse attention in every layer."""
    return override(tiny_sala(), "name=tiny_sala_sparse_only", f"model.mixer_types={','.join([SPARSE] * 8)}")


@EXPERIMENTS.register("tiny_sala_adamw")
def tiny_sala_adamw() -> ExperimentConfig:
    """AdamW for every parameter."""
    return override(tiny_sala(), "name=tiny_sala_adamw", "optimizer.name=adamw")


@EXPERIMENTS.register("tiny_sala_cosine")
def tiny_sala_cosine() -> ExperimentConfig:
    """A cosine schedule."""
    return override(tiny_sala(), "name=tiny_sala_cosine", "schedule.name=cosine")


_TINY_FLASH_NEXT = Qwen4ExpConfig(
    vocab_size=2048,
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_parameters=qwen4.RopeConfig(rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=(3, 3, 2)),
    max_position_embeddings=4096,
    layer_types=(qwen4.LINEAR, qwen4.LINEAR, qwen4.LINEAR, qwen4.INDEXED) * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    router_aux_loss_coef=0.01,
    hc_lowrank=16,
    ple_embed_dim=64,
    heads_per_ngram=2,
    ngram_vocab_size_base=4096,
    split_ngram_parts=4,
    indexer_n_heads=2,
    indexer_head_dim=32,
    indexer_budget=256,
    bos_token_id=BOS,
    eos_token_id=(EOS, IM_END),
    pad_token_id=EOS,
    initializer_range=0.05,
)


@EXPERIMENTS.register("tiny_flash_next")
def tiny_flash_next() -> ExperimentConfig:
    """The bundled Qwen4Exp: every part of the release in 5.8 M parameters."""
    return ExperimentConfig(
        name="tiny_flash_next",
        model=_TINY_FLASH_NEXT,
        data=DataConfig(evaluation_batch=8),
        batch_size=16,
        steps=899,
        schedule=ScheduleConfig(warmup_steps=100, decay_share=0.445),
        # The kernel that serves 16 experts best has a slow gradient.
        implementation="experts=dense",
    )


@EXPERIMENTS.register("tiny_flash_next_debug")
def tiny_flash_next_debug() -> ExperimentConfig:
    """Three small layers with every part: the whole path in minutes on a CPU."""
    model = dataclasses.replace(
        _TINY_FLASH_NEXT,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=(qwen4.LINEAR, qwen4.LINEAR, qwen4.INDEXED),
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        hc_count=2,
        hc_lowrank=8,
        ngram_vocab_size_base=512,
        indexer_budget=64,
    )
    return ExperimentConfig(
        name="tiny_flash_next_debug",
        model=model,
        data=DataConfig(evaluation_length=512, evaluation_documents=6, evaluation_batch=8),
        batch_size=8,
        sequence_length=256,
        steps=200,
        compute_dtype="float32",
        schedule=ScheduleConfig(warmup_steps=20),
        eval_every=100,
        checkpoint_every=100,
        implementation="experts=dense",
    )


@EXPERIMENTS.register("tiny_flash_next_no_ngrams")
def tiny_flash_next_no_ngrams() -> ExperimentConfig:
    """Without the n-gram embedding."""
    return override(tiny_flash_next(), "name=tiny_flash_next_no_ngrams", "model.ple_layer_ids=")


@EXPERIMENTS.register("tiny_flash_next_linear_only")
def tiny_flash_next_linear_only() -> ExperimentConfig:
    """Gated DeltaNet in every layer, the MTP head's own layer apart."""
    kinds = ",".join([qwen4.LINEAR] * 8)
    return override(tiny_flash_next(), "name=tiny_flash_next_linear_only", f"model.layer_types={kinds}")


@EXPERIMENTS.register("tiny_flash_next_no_mtp")
def tiny_flash_next_no_mtp() -> ExperimentConfig:
    """Without the MTP head and its loss."""
    return override(tiny_flash_next(), "name=tiny_flash_next_no_mtp", "model.mtp_num_hidden_layers=0")


@EXPERIMENTS.register("tiny_flash_next_two_streams")
def tiny_flash_next_two_streams() -> ExperimentConfig:
    """Two residual streams instead of four."""
    return override(tiny_flash_next(), "name=tiny_flash_next_two_streams", "model.hc_count=2")


def override[C](config: C, *assignments: str) -> C:
    """The configuration with fields replaced, all at once, so that dependent fields can change together.

    Args:
      config: a frozen dataclass that may hold others.
      assignments: ``"field=value"`` or ``"field.inner=value"``; values are parsed by the field's type:
        ``4096`` or ``4k``, ``1e-3``, ``true``, ``none``, comma-separated items for tuples.

    Raises:
      ConfigError: no ``=``, an unknown field (names the known ones), a value of another type, or a
        value that the configuration refuses.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"cannot read {assignment!r}; expected field=value or field.inner=value")
        *outer, last = (part.strip() for part in path.split("."))
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{path.strip()!r}: {part!r} is set to a value elsewhere")
        node[last] = value.strip()
    return _replace(config, tree, "")


def _replace(config: Any, tree: dict[str, Any], prefix: str) -> Any:
    kinds = typing.get_type_hints(type(config))
    known = [f.name for f in dataclasses.fields(config)]
    changes = {}
    for name, value in tree.items():
        full = prefix + name
        if name not in known:
            raise ConfigError(f"unknown field {full!r}; known: {', '.join(prefix + k for k in known)}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                inner = ", ".join(f"{full}.{f.name}" for f in dataclasses.fields(current))
                raise ConfigError(f"{full!r} has fields of its own; set one of: {inner}")
            changes[name] = _replace(current, value, full + ".")
        elif isinstance(value, dict):
            raise ConfigError(f"{full!r} is a plain value; it has no field {next(iter(value))!r}")
        else:
            changes[name] = parse_value(full, value, kinds[name])
    return dataclasses.replace(config, **changes)


def parse_value(name: str, text: str, kind: Any) -> Any:
    """``text`` as a value of the annotated type.

    Raises:
      ConfigError: it cannot be read as that type; the message has the field's name.
    """
    origin = typing.get_origin(kind)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return tuple(parse_value(name, part.strip(), item) for part in text.split(",") if part.strip())
    options = typing.get_args(kind) if origin in (types.UnionType, typing.Union) else (kind,)
    if not all(option in _PARSERS for option in options):
        raise ConfigError(f"{name} cannot be set here")
    for option in sorted(options, key=_strictness):
        try:
            return _PARSERS[option](text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
    names = " or ".join("none" if k is types.NoneType else k.__name__ for k in options)
    raise ConfigError(f"{name} is {text!r}; it must be of type {names}")


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _fail(text)


def _none(text: str) -> None:
    return None if text.lower() in ("none", "null") else _fail(text)


def _fail(text: str) -> typing.Never:
    raise ValueError(text)


_PARSERS: dict[Any, Callable[[str], Any]] = {
    types.NoneType: _none,
    bool: _boolean,
    int: readable_int,
    float: float,
    str: str,
}


def _strictness(kind: Any) -> int:
    return list(_PARSERS).index(kind)


def describe() -> str:
    """One line per experiment: name and the first line of its docstring."""
    width = max(map(len, EXPERIMENTS))
    return "\n".join(f"{n:<{width}}  {(EXPERIMENTS[n].__doc__ or '').splitlines()[0]}" for n in EXPERIMENTS)
