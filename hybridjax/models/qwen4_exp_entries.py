"""The tensors of a Qwen4Exp checkpoint (qwen4_exp 2, 10) and the parameters that they fill."""

import re
from collections.abc import Iterator, Mapping

from hybridjax.configs.qwen4_exp import INDEXED, Qwen4ExpConfig
from hybridjax.errors import CheckpointError
from hybridjax.models.base import Path, ScaleEntry, TensorEntry
from hybridjax.ops.ngram_hash import NgramHash

Shapes = Mapping[str, tuple[int, ...]]

_BLOCK = (128, 128)  # elements that share a scale in the FP8 release (qwen4_exp 2.3)
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)\d+\.")
_SHARD = re.compile(r"shard_(\d{1,9})\.weight")


def checkpoint_entries(
    config: Qwen4ExpConfig, prefix: str, names: Shapes | None = None
) -> Iterator[TensorEntry]:
    """Every tensor of a checkpoint of this configuration, in layer order.

    Experts may be stored fused (BF16 release) or one by one (FP8 release), layer by layer; the n-gram table
    in any number of shards.

    Args:
      config: of the text model.
      prefix: of the text model's names: ``model.``, or ``model.language_model.`` where images come with it.
      names: shapes by name of the tensors that a checkpoint has; None: the layout of the BF16 release.

    Raises:
      CheckpointError: the shards of an n-gram table do not tile it.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    apart = frozenset(match[1] for name in names or () if (match := _EXPERT.match(name)))
    yield TensorEntry(prefix + "embed_tokens.weight", (vocab, hidden), ("embed_tokens", "weight", "value"))
    for i, kind in enumerate(config.layer_types):
        name, path = f"{prefix}layers.{i}.", ("layers", i)
        if i in config.ple_layers:
            yield from _ple(config, config.ple_layers.index(i), name + "ple.", (*path, "ple"), names)
        yield from _layer(config, kind, name, path, apart)
    yield from _mix(config, prefix + "hyper_connection_mixer.", ("final_mix",), inject=False)
    if not config.tie_word_embeddings:
        yield TensorEntry("lm_head.weight", (vocab, hidden), ("lm_head", "weight", "value"))
    if config.mtp_num_hidden_layers:
        yield from _mtp(config, apart)


def table_path(layer: int) -> Path:
    """Where the n-gram table of a PLE layer lives, in models that have it as a parameter."""
    return ("layers", layer, "ple", "table", "weight", "value")


def _layer(
    config: Qwen4ExpConfig, kind: str, name: str, path: Path, apart: frozenset[str]
) -> Iterator[TensorEntry]:
    yield from _mix(config, name + "attn_hyper_connection.", (*path, "attn_mix"))
    if kind == INDEXED:
        yield from _indexed_attention(config, name + "self_attn.", (*path, "mixer"))
    else:
        yield from _gated_delta(config, name + "linear_attn.", (*path, "mixer"))
    yield from _mix(config, name + "mlp_hyper_connection.", (*path, "mlp_mix"))
    yield from _moe(config, name + "mlp.", (*path, "mlp"), apart)


def _mix(config: Qwen4ExpConfig, name: str, path: Path, inject: bool = True) -> Iterator[TensorEntry]:
    width, rank = config.hc_count * config.hidden_size, config.hc_lowrank
    yield _vector(name + "hc_norm", width, (*path, "hc_norm"))
    yield _matrix(name + "input_mix_weight_down", (rank, width), (*path, "down"))
    yield _matrix(name + "input_mix_weight_up", (width, rank), (*path, "up"))
    if inject:
        yield _matrix(name + "block_inject_weight", (config.hc_count, width), (*path, "inject"))


def _gated_delta(config: Qwen4ExpConfig, name: str, path: Path) -> Iterator[TensorEntry]:
    heads = config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    parts = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    yield from _fused(name, parts, config.hidden_size, (*path, "in_proj"))
    kernel = config.linear_conv_kernel_dim
    yield TensorEntry(name + "conv1d.weight", (channels, 1, kernel), (*path, "conv_weight"))
    yield TensorEntry(name + "A_log", (heads,), (*path, "A_log"))
    yield TensorEntry(name + "dt_bias", (heads,), (*path, "dt_bias"))
    yield TensorEntry(name + "norm.weight", (config.linear_value_head_dim,), (*path, "norm_weight"))
    yield _matrix(name + "out_proj", (config.hidden_size, values), (*path, "out_proj"))


def _indexed_attention(config: Qwen4ExpConfig, name: str, path: Path) -> Iterator[TensorEntry]:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    index_width = config.indexer_head_dim
    # Each head's rows of q_proj are its query and its output gate.
    parts = {"q_proj": 2 * width, "k_proj": kv_width, "v_proj": kv_width}
    index_rows = (config.indexer_n_heads + config.indexer_kv_heads) * index_width
    yield from _fused(name, {**parts, "indexer.index_qk_proj": index_rows}, hidden, (*path, "in_proj"))
    if config.attention_bias:
        start = 0
        for part, rows in parts.items():
            yield TensorEntry(f"{name}{part}.bias", (rows,), (*path, "in_bias"), start)
            start += rows
        yield TensorEntry(name + "o_proj.bias", (hidden,), (*path, "o_bias"))
    yield _vector(name + "q_norm", config.head_dim, (*path, "q_norm"))
    yield _vector(name + "k_norm", config.head_dim, (*path, "k_norm"))
    yield _vector(name + "indexer.q_layernorm", index_width, (*path, "index_q_norm"))
    yield _vector(name + "indexer.k_layernorm", index_width, (*path, "index_k_norm"))
    yield _matrix(name + "o_proj", (hidden, width), (*path, "o_proj"))


def _moe(config: Qwen4ExpConfig, name: str, path: Path, apart: frozenset[str]) -> Iterator[TensorEntry]:
    hidden, count = config.hidden_size, config.num_experts
    ffn, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    yield _matrix(name + "gate", (count, hidden), (*path, "gate"))
    gate_up, down = (*path, "experts", "gate_up"), (*path, "experts", "down")
    experts = name + "experts."
    if experts in apart:
        for e in range(count):
            yield _expert(f"{experts}{e}.gate_proj.weight", (ffn, hidden), gate_up, e)
            yield _expert(f"{experts}{e}.up_proj.weight", (ffn, hidden), gate_up, e, start=ffn)
            yield _expert(f"{experts}{e}.down_proj.weight", (hidden, ffn), down, e)
    else:
        yield TensorEntry(experts + "gate_up_proj", (count, 2 * ffn, hidden), gate_up)
        yield TensorEntry(experts + "down_proj", (count, hidden, ffn), down)
    both = {"gate_proj": shared, "up_proj": shared}
    yield from _fused(name + "shared_expert.", both, hidden, (*path, "shared", "gate_up"))
    yield _matrix(name + "shared_expert.down_proj", (hidden, shared), (*path, "shared", "down"))
    yield _matrix(name + "shared_expert_gate", (1, hidden), (*path, "shared_gate"))


def _expert(name: str, shape: tuple[int, int], path: Path, index: int, start: int = 0) -> TensorEntry:
    return TensorEntry(name, shape, path, start, index, ScaleEntry(name + "_scale_inv", _BLOCK))


def _ple(
    config: Qwen4ExpConfig, number: int, name: str, path: Path, names: Shapes | None
) -> Iterator[TensorEntry]:
    hidden, embed = config.hidden_size, config.ple_embed_dim
    width = config.hc_count * hidden
    yield _matrix(name + "key_proj", (width, embed), (*path, "key_proj"))
    yield _matrix(name + "value_proj", (hidden, embed), (*path, "value_proj"))
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield _vector(name + norm, width, (*path, norm))
    kernel = config.ple_conv_kernel_size
    yield TensorEntry(name + "conv1d.weight", (width, 1, kernel), (*path, "conv_weight"))
    hashing = NgramHash.from_config(config, number)
    shape = (hashing.rows, embed // len(hashing.head_sizes))
    name += "ple_embedding.ngram_embedding."
    scale = ScaleEntry(name + "weight_scale")
    path = table_path(config.ple_layers[number])
    if names is not None and name + "weight" in names:
        yield TensorEntry(name + "weight", shape, path, scale=scale)
        return
    start = 0
    for i, rows in enumerate(_shard_rows(config, name, shape[0], names)):
        yield TensorEntry(f"{name}shard_{i}.weight", (rows, shape[1]), path, start, scale=scale)
        start += rows


def _shard_rows(config: Qwen4ExpConfig, name: str, total: int, names: Shapes | None) -> list[int]:
    """Rows of each shard, in the shards' order; as released, or as stored."""
    if names is None:
        size = -(-total // config.split_ngram_parts)
        return [min(size, total - start) for start in range(0, total, size)]
    # Numbers, not names, give the order: shard_10 comes after shard_2.
    found = {int(match[1]): item for item in names if (match := _shard_number(item, name))}
    if not found:
        raise CheckpointError(f"{name}shard_0.weight [rows, columns] is missing")
    for i in range(len(found)):
        if i not in found:
            raise CheckpointError(f"{name}shard_{i}.weight is missing, though there is {found[max(found)]}")
    rows = [names[found[i]][0] if names[found[i]] else 0 for i in range(len(found))]
    if 0 in rows:
        raise CheckpointError(f"{name}shard_{rows.index(0)}.weight has no rows")
    if sum(rows) != total:
        last = len(rows) - 1
        raise CheckpointError(
            f"the shards of an n-gram table do not tile it: {name}shard_0 to shard_{last} have {sum(rows)} "
            f"rows, the last one {rows[last]} from row {sum(rows[:-1])} on; the table has {total}"
        )
    return rows


def _shard_number(item: str, name: str) -> re.Match[str] | None:
    return _SHARD.fullmatch(item, len(name)) if item.startswith(name) else None


def _mtp(config: Qwen4ExpConfig, apart: frozenset[str]) -> Iterator[TensorEntry]:
    hidden = config.hidden_size
    yield _matrix("mtp.fc_embedding", (hidden, hidden), ("mtp", "fc_embedding"))
    yield _matrix("mtp.fc_hidden", (hidden, hidden), ("mtp", "fc_hidden"))
    yield _vector("mtp.pre_fc_norm_embedding", hidden, ("mtp", "norm_embedding"))
    yield _vector("mtp.pre_fc_norm_hidden", config.hc_count * hidden, ("mtp", "norm_hidden"))
    yield from _layer(config, INDEXED, "mtp.layers.0.", ("mtp", "layer"), apart)
    yield from _mix(config, "mtp.hyper_connection_mixer.", ("mtp", "mix"), inject=False)


def _matrix(name: str, shape: tuple[int, int], path: Path) -> TensorEntry:
    return TensorEntry(name + ".weight", shape, (*path, "weight", "value"))


def _vector(name: str, size: int, path: Path) -> TensorEntry:
    return TensorEntry(name + ".weight", (size,), (*path, "weight"))


def _fused(name: str, parts: Mapping[str, int], columns: int, path: Path) -> Iterator[TensorEntry]:
    start = 0
    for part, rows in parts.items():
        yield TensorEntry(f"{name}{part}.weight", (rows, columns), (*path, "weight", "value"), start)
        start += rows
