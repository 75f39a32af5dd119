"""What NVFP4 costs the bundled models: methods and scale rules on held-out code and prose.

    python -m benchmarks.quantization --output DIR [--models tiny-sala ...] [--quick]
    python -m benchmarks.quantization --few-tokens

Calibrates on training documents of the project's corpus and evaluates on its held-out ones. ``--few-tokens``
instead asks how many rows an expert must have seen for GPTQ to pay.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.common import environment
from hybridjax.calibration import Quantization, Settings
from hybridjax.calibration.observe import Inputs, observe
from hybridjax.calibration.perplexity import Perplexity, measure
from hybridjax.calibration.rounding import round_matrix
from hybridjax.calibration.selection import LayerPlan, make_plan
from hybridjax.calibration.streaming import LayerStream
from hybridjax.calibration.text import Sample, batches, cut, evenly, read_documents
from hybridjax.checkpoints import load_tokenizer, resolve
from hybridjax.training import corpus

MODELS = ("tiny-sala", "tiny-flash-next")
RUNS = tuple((method, rule) for rule in ("static_6", "mse") for method in ("rtn", "gptq"))
MORE_RULES = ("static_4", "mae", "abs_max")
CHARACTERS = 8000  # of a document, so that no book is all of the text


def write_texts(directory: Path, cache: Path) -> None:
    """calibration.jsonl (training documents), code.jsonl and prose.jsonl (held-out ones)."""
    split = corpus.split_corpus(corpus.load_corpus(cache))
    chosen: dict[str, list[str]] = {"calibration": []}
    for source, count in ((corpus.CODE, 60), (corpus.PROSE, 20)):
        train = [d.text[:CHARACTERS] for d in split.train if d.source == source]
        chosen["calibration"] += evenly(train, count)
        chosen[source] = [d.text for d in split.heldout if d.source == source]
    for name, texts in chosen.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def grid(
    model: str, directory: Path, runs: Sequence[tuple[str, str]], samples: int, length: int
) -> Iterator[dict[str, Any]]:
    """One row per method and rule, the unquantised model first."""
    tokenizer: Any = load_tokenizer(model)
    texts: dict[str, list[Sample]] = {}
    for name in (corpus.CODE, corpus.PROSE):
        documents = read_documents(directory / f"{name}.jsonl", tokenizer)
        texts[name] = evenly(cut(documents, tokenizer, length), samples)

    def costs(path: Path, activations: str, base: dict[str, Perplexity]) -> dict[str, Perplexity]:
        return {
            name: measure(path, text, dtype="float32", activations=activations, against=base.get(name))
            for name, text in texts.items()
        }

    def row(name: str, found: dict[str, Perplexity], **fields: Any) -> dict[str, Any]:
        bits = {text: cost.bits_per_byte for text, cost in found.items()}
        apart = {text: cost.divergence for text, cost in found.items()}
        return {"model": model, "run": name, **fields, "bits_per_byte": bits, "divergence": apart}

    base = costs(resolve(model), "w4a16", {})
    yield row("unquantised", base)
    for method, rule in runs:
        target = directory / f"{model}-{method}-{rule}"
        settings = Settings(
            method=method, scale_rule=rule, calibration_samples=samples, calibration_length=length
        )
        report = Quantization(
            model,
            target,
            "modelopt",
            settings,
            calibration=directory / "calibration.jsonl",
            evaluation=directory / f"{corpus.PROSE}.jsonl",
            dtype="float32",
            restart=True,
        ).quantize()
        for activations in ("w4a16", "w4a4"):
            found = costs(target, activations, base)
            yield row(f"{method} {rule}", found, activations=activations, fours=report["share_of_fours"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: bits per byte, in brackets what is lost, and the divergence in nats per token."""
    base = rows[0]["bits_per_byte"]
    heads = [f"{name}, {what}" for name in base for what in ("bits per byte", "divergence")]
    lines = [f"| {rows[0]['model']} | activations | " + " | ".join(heads) + " |"]
    lines += ["|---" * (2 + len(heads)) + "|"]
    lines.append("| unquantised | | " + " | ".join(f"{value:.4f} | " for value in base.values()) + " |")
    for row in rows[1:]:
        cells = []
        for name, value in row["bits_per_byte"].items():
            cells += [f"{value:.4f} ({value - base[name]:+.4f})", f"{row['divergence'][name]:.4f}"]
        lines.append(f"| {row['run']} | {row['activations'].upper()} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def few_tokens(directory: Path, layer: int = 4) -> Iterator[dict[str, Any]]:
    """Output errors of GPTQ relative to rounding, on rows that it has not seen, by rows per column."""
    model = "tiny-flash-next"
    tokenizer: Any = load_tokenizer(model)
    samples = evenly(cut(read_documents(directory / "calibration.jsonl", tokenizer), tokenizer, 1024), 32)
    stream = LayerStream(resolve(model), "float32")
    plan = make_plan(stream.model, stream.weights, ()).layers[layer]
    work = batches(samples)
    hidden = [stream.embed(tokens) for tokens in work]
    for index in range(layer):
        run = stream.layer(index)
        hidden = [run(h, t.whole(), stream.ngram_rows(index, t)) for h, t in zip(hidden, work)]
    run = stream.layer(layer)
    seen = observe(run, LayerPlan({}, plan.experts), [(h, t.whole(), None) for h, t in zip(hidden, work)])
    ((path, rows),) = seen.experts.items()
    gate_up = dict(run.parameters())[(*path, "gate_up")]
    columns = gate_up.shape[2]
    options = {"rule": "mse", "method": "gptq", "damping": 0.01, "ordering": "static"}
    rng = np.random.default_rng(0)
    for share in (1 / 4, 1 / 2, 1, 1.25, 1.5, 2, 4, 8):
        ratios = []
        for expert in range(gate_up.shape[0]):
            x = rng.permutation(np.concatenate([x[(ids == expert).any(axis=1)] for x, ids in rows]))
            known, unknown = jnp.asarray(x[: round(columns * share)]), jnp.asarray(x[len(x) // 2 :])
            if len(known) > len(x) // 2:
                continue
            inputs = Inputs.none(columns).plus(known)
            losses = []
            for enough in (True, False):
                found = round_matrix(gate_up[expert], inputs, jnp.asarray(enough), **options)
                losses.append(float(_loss(found, gate_up[expert], unknown)))
            ratios.append((losses[0] / losses[1]) ** 0.5)
        yield {"rows_per_column": share, "experts": len(ratios), "error": float(np.mean(ratios))}


def _loss(found: Any, weight: Any, x: Any) -> Any:
    from hybridjax.quantization import dequantize

    out = jnp.einsum("nk,ok->no", x, dequantize(found.weight) - weight)
    return jnp.sum(out * out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("/tmp/quantization"), help="where all is written")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/hybridjax/corpus"), help="of the corpus")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--more-rules", action="store_true", help="also the rules that lose")
    parser.add_argument("--few-tokens", action="store_true")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_texts(arguments.output, arguments.cache.expanduser())
    if arguments.few_tokens:
        for row in few_tokens(arguments.output):
            print(json.dumps(row), flush=True)
        return 0
    runs = [*RUNS, *((m, r) for r in MORE_RULES for m in ("rtn", "gptq") if arguments.more_rules)]
    for model in arguments.models:
        rows = []
        for row in grid(model, arguments.output, runs, arguments.samples, arguments.length):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        print(table(rows) + "\n", flush=True)
    print(json.dumps(environment()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
