"""What a finished run leaves: a pretrained directory, its evaluation and a model card of measured values."""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.configs import MiniCPMSALAConfig, Qwen4ExpConfig
from hybridjax.errors import ConfigError
from hybridjax.training.config import DataConfig, ExperimentConfig
from hybridjax.training.data import PreparedData
from hybridjax.training.diagnostics import diagnose, heldout_rows
from hybridjax.training.evaluation import Evaluator
from hybridjax.training.parameters import ParameterLayout, count
from hybridjax.training.step import DataParallel, make_row_nats
from hybridjax.training.trainer import Trainer, TrainResult

SHIPPED_DTYPE = "bfloat16"
_CARD, _EVALUATION = "README.md", "evaluation.json"


def check_output(directory: Path) -> None:
    """Fails before a run where ``write_pretrained`` would fail after it.

    Raises:
      CheckpointError: the directory holds something else than an earlier output, or cannot be written.
    """
    from hybridjax.checkpoints import check_target

    check_target(directory, (_CARD, _EVALUATION))


def write_pretrained(trainer: Trainer, result: TrainResult, directory: Path) -> dict[str, Any]:
    """Writes weights in bfloat16, config, tokenizer, ``evaluation.json`` and ``README.md``.

    The evaluation reads the same files back and computes in float32, so anybody can repeat it.

    Args:
      trainer: of the run.
      result: what it returned.
      directory: where to write; created if need be. An earlier output is replaced.

    Returns:
      The content of ``evaluation.json``.

    Raises:
      CheckpointError: the directory holds something else than an earlier output, or cannot be written.
    """
    # Its readers (safetensors) are not needed to train.
    from hybridjax.checkpoints import save_pretrained

    model = trainer.layout.model(result.tensors, jnp.dtype(SHIPPED_DTYPE))
    model.config = dataclasses.replace(trainer.config.model, dtype=SHIPPED_DTYPE)
    with tempfile.TemporaryDirectory() as temporary:
        draft = Path(temporary, "model")
        save_pretrained(model, draft, tokenizer_dir=trainer.data.directory)
        heldout = evaluate_pretrained(draft, trainer.data, trainer.config.data)
        parts = _diagnose(draft, trainer)
    report = {
        "experiment": trainer.config.name,
        "steps": result.steps,
        "finished": result.finished,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 1),
        "device": f"{trainer.parallel.size} x {jax.devices()[0].device_kind}",
        "parameters": count(result.tensors),
        "corpus_sha256": trainer.data.info["corpus_sha256"],
        "heldout": heldout,
        **({"parts": parts} if parts else {}),
    }
    extra_files = {
        _EVALUATION: json.dumps(report, indent=1) + "\n",
        _CARD: model_card(trainer.config, trainer.data, report),
    }
    save_pretrained(model, directory, tokenizer_dir=trainer.data.directory, extra_files=extra_files)
    return report


def evaluate_pretrained(directory: Path, data: PreparedData, settings: DataConfig) -> dict[str, Any]:
    """The held-out report of a pretrained directory, computed in float32.

    Raises:
      ConfigError: the model's tokenizer is not the one that the data was prepared with.
    """
    from hybridjax.checkpoints import load_model

    own = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    if own != data.info["sha256"]["tokenizer.json"]:
        raise ConfigError(
            f"{directory} has another tokenizer than {data.directory}; figures would not compare"
        )
    model = load_model(str(directory), dtype="float32")
    layout, parallel = ParameterLayout.of(model), DataParallel()
    row_nats = make_row_nats(layout, "float32", parallel)
    tensors = jax.device_put(layout.tensors(model), parallel.replicated)
    batch = -(-settings.evaluation_batch // parallel.size) * parallel.size
    evaluator = Evaluator(
        data, length=settings.evaluation_length, batch=batch, limit=settings.evaluation_documents
    )
    return evaluator(lambda *rows: row_nats(tensors, *rows), per_document=True)


def _diagnose(directory: Path, trainer: Trainer) -> dict[str, Any]:
    """What diagnostics says of the saved model; empty for models without such parts or long documents."""
    from hybridjax.checkpoints import load_model

    rows = heldout_rows(trainer.data)
    return (
        diagnose(load_model(str(directory), dtype="float32"), rows)
        if trainer.layout.losses and len(rows)
        else {}
    )


def model_card(config: ExperimentConfig, data: PreparedData, report: dict[str, Any]) -> str:
    """The README of a pretrained directory, from the configuration and what was measured."""
    name = config.name.replace("_", "-")
    return (
        "\n\n".join(
            (
                "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: hybridjax\n"
                "pipeline_tag: text-generation\n---",
                f"# {name}",
                _summary(config, report),
                "## Held-out text",
                _figures(report["heldout"]),
                "Every token of the held-out documents, the closing `</s>` included, is predicted once with "
                f"{config.data.evaluation_length // 2} to {config.data.evaluation_length} tokens of context "
                "where the document has them, by these weights in float32. `xz` is `xz -9e` on the same "
                "bytes, documents concatenated. "
                "Documents are held out by a hash of their path; training documents that share more than "
                "half of their lines with a held-out one were dropped "
                f"({data.info['dropped']} documents). Figures by document are in `evaluation.json`.",
                *(("## Parts", _parts(config, report["parts"])) if "parts" in report else ()),
                "## Training",
                _recipe(config, report),
                "## Data",
                _data(data),
                "## Limits",
                "A model of this size writes plausible Python and Bible prose, and no facts. Its chat format "
                "is trained on excerpts only: asked anything, it continues the text. It exists to exercise "
                "hybridjax on real weights.",
            )
        )
        + "\n"
    )


def _summary(config: ExperimentConfig, report: dict[str, Any]) -> str:
    model = config.model
    mixers, sparse = _qwen4_exp(model) if isinstance(model, Qwen4ExpConfig) else _minicpm_sala(model)
    kinds = {kind: mixers.count(kind) for kind in dict.fromkeys(mixers)}
    layers = " and ".join(f"{n} `{kind}`" for kind, n in kinds.items())
    state = "" if report["finished"] else f" **Unfinished: step {report['steps']} of {config.steps}.**"
    return (
        f"A small {model.architecture} ({report['parameters']:,} parameters, {SHIPPED_DTYPE}): "
        f"{layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocab_size}, context "
        f"{model.max_position_embeddings} tokens. {sparse}{state}"
    )


def _minicpm_sala(model: MiniCPMSALAConfig) -> tuple[tuple[str, ...], str]:
    """The layers' kinds, and what is sparse, in words."""
    sparse = model.sparse_config
    # Until then the selected blocks are all there are.
    dense = max(sparse.dense_len, sparse.selected_blocks * sparse.block_size)
    return model.mixer_types, (
        f"A query beyond {dense} tokens attends to {sparse.selected_blocks} blocks of {sparse.block_size}."
    )


def _qwen4_exp(model: Qwen4ExpConfig) -> tuple[tuple[str, ...], str]:
    words = (
        f"{model.num_experts} experts, {model.num_experts_per_tok} per token, and a shared one; "
        f"{model.hc_count} residual streams"
    )
    if model.ple_layers:
        count = (model.ngram_size - 1) * model.heads_per_ngram
        words += f"; n-gram embeddings by {count} hashes before layer {model.ple_layers[0] + 1}"
    words += "; a draft (MTP) head" * model.mtp_num_hidden_layers
    ratio = model.indexer_compress_ratio
    return model.layer_types, (
        f"{words}. Indexed attention reads {model.indexer_budget // ratio} blocks of {ratio} tokens "
        "and the block not yet complete."
    )


def _figures(heldout: dict[str, Any]) -> str:
    rows = [
        "| text | documents | bytes | tokens | bits per byte | xz -9e, bits per byte |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(k for k in heldout if k != "documents"):
        row = heldout[name]
        rows.append(
            f"| {name} | {row['documents']} | {row['bytes']:,} | {row['tokens']:,} | "
            f"{row['bits_per_byte']:.3f} | {row['xz_bits_per_byte']:.3f} |"
        )
    return "\n".join(rows)


def _parts(config: ExperimentConfig, parts: dict[str, Any]) -> str:
    load = parts["expert_load"].values()
    lines = [
        f"On the first {parts['length']} tokens of {parts['rows']} held-out documents, in float32:",
        "",
        f"- Experts: the busiest of a layer gets {sum(load) / len(load):.2f} times the mean, averaged over "
        f"the layers, and {max(load):.2f} times in the least even one.",
    ]
    if "mtp_agreement" in parts:
        lines.append(
            f"- Draft head: the greedy token of one draft step is the model's own in "
            f"{parts['mtp_agreement']:.1%} of all places."
        )
    if "attention_share" in parts:
        share = parts["attention_share"]
        lines.append(
            f"- Indexer: the chosen blocks hold {share['chosen']:.1%} of dense attention's weight on "
            f"complete blocks, where some are left out; as many would hold {share['best']:.1%} at best, "
            f"{share['latest']:.1%} if they were the latest, {share['random']:.1%} at random."
        )
    return "\n".join(lines)


def _recipe(config: ExperimentConfig, report: dict[str, Any]) -> str:
    optimizer, schedule = config.optimizer, config.schedule
    longer = (
        f", sequences of {config.long_sequence_length} in the last {config.long_steps} steps"
        if config.long_steps
        else ""
    )
    if not config.long_steps and config.sequence_length < config.model.max_position_embeddings:
        longer = "; positions beyond were not trained"
    losses = f"z-loss {config.z_loss:g}"
    if isinstance(config.model, Qwen4ExpConfig):
        losses += (
            f", router balance {config.model.router_aux_loss_coef:g}, draft loss {config.mtp_loss:g}, "
            f"indexer loss {config.indexer_loss:g}"
        )
    return (
        f"`python -m hybridjax.train --experiment {config.name}`: {report['steps']:,} steps, "
        f"{report['tokens']:,} tokens, {report['seconds']:,.0f} s on {report['device']}. Batches of "
        f"{config.batch_size} x {config.sequence_length} tokens{longer}. {optimizer.name} at "
        f"{optimizer.learning_rate:g} (hidden matrices) and {optimizer.embedding_learning_rate:g} (rest), "
        f"weight decay {optimizer.weight_decay:g}, clipping at {optimizer.grad_clip:g}, {schedule.name} "
        f"schedule with {schedule.warmup_steps} warm-up steps, {losses}, float32 masters, "
        f"{config.compute_dtype} compute, seed {config.seed}."
    )


def _data(data: PreparedData) -> str:
    lines = [
        f"- {name}: {group['documents']} documents, {group['tokens']:,} tokens"
        + (f", {group['bytes']:,} bytes" if group["bytes"] else "")
        for name, group in data.info["train"].items()
    ]
    licences = [f"- {text}" for text in data.info["licences"].values()]
    hashes = [f"- corpus: `{data.info['corpus_sha256']}`"]
    hashes += [f"- {name}: `{digest}`" for name, digest in data.info["sha256"].items()]
    return "\n".join(
        [
            f"Prepared with Python {data.info['python']} by `python -m hybridjax.train --prepare-data`:",
            "",
            *lines,
            "",
            "Origins and licences:",
            "",
            *licences,
            "",
            "SHA-256 (corpus: over split, hash and path of every document):",
            "",
            *hashes,
        ]
    )
