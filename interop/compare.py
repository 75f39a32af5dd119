"""Compares checkpoints between transformers and hybridjax: logits, selected blocks, greedy tokens, images.

    python interop/compare.py MODEL_DIR [MODEL_DIR ...] --torch-python /path/to/python

MODEL_DIR is a checkpoint directory or a bundled model's name. transformers runs in a process of its own
(interop/transformers_answers.py), under the given Python. docs/interoperability.md explains the table.

Exit status: 0 if everything agrees or differs by ties alone; 1 if something differs beyond the tolerance;
2 if something could not be compared.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from comparison import (
    DIFFERS,
    OK,
    SCORE_ROUNDING,
    TIE,
    TOLERANCE,
    Answers,
    InteropError,
    Picture,
    Prompt,
    compare_image,
    compare_prompt,
    image_arguments,
)
from safetensors import SafetensorError, safe_open

import hybridjax
from hybridjax.checkpoints import load_config, load_model, load_tokenizer, resolve
from hybridjax.errors import HybridJaxError
from hybridjax.images import ImageProcessor, decode_image, expand_placeholders
from hybridjax.json_files import read_object
from hybridjax.serving import Engine, SamplingParams

ANSWERS = Path(__file__).with_name("transformers_answers.py")
TEXTS = ("import os\n\n\ndef main(arguments):\n", "In the beginning, Zoë said: 1 + 1 = 2 — naïve? 你好!")


def ask_transformers(
    python: str, request: Mapping[str, Any], timeout: float
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and facts that transformers_answers.py gives.

    Raises:
      InteropError: the program cannot start, fails, takes longer than ``timeout`` seconds, writes no
        answers or damaged ones, or transformers refuses the checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="interop-") as directory:
        question, answers, errors = (Path(directory, n) for n in ("request.json", "answers", "stderr"))
        question.write_text(json.dumps(request))
        # The other environment must not find this one's packages.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        command = [python, str(ANSWERS), str(question), str(answers)]
        with errors.open("wb") as stderr:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise InteropError(f"{python} does not start: {error}") from None
            try:
                status = process.wait(timeout)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise InteropError(
                    f"transformers gave no answer within {timeout:g} s:{_tail(errors)}"
                ) from None
        if status:
            raise InteropError(f"{python} ended with status {status}:{_tail(errors)}")
        try:
            # safe_open reads the file as mapped memory; nothing in it is code.
            with safe_open(str(answers), "numpy") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise InteropError(f"{python} wrote no readable answers: {error}{_tail(errors)}") from None
    if "refusal" in facts:
        raise InteropError(facts["refusal"])
    return tensors, facts


def _tail(errors: Path, lines: int = 30) -> str:
    text = errors.read_text(errors="replace").strip()
    return "".join(f"\n    {line}" for line in text.splitlines()[-lines:])


def make_prompts(config: Any, tokenizer: Any, arguments: argparse.Namespace) -> list[Prompt]:
    """Random ids of several lengths, texts if there is a tokenizer, an image if one is given."""
    text_config = getattr(config, "text_config", config)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = [getattr(config, name) for name in names if hasattr(config, name)]
    ordinary = np.setdiff1d(np.arange(text_config.vocab_size), special)
    random = np.random.default_rng(arguments.seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(random.choice(ordinary, length).tolist())

    length = arguments.length
    lengths = {max(1, length // 5), max(1, length * 2 // 3), length}
    if hasattr(text_config, "indexer_budget"):
        lengths.add(max(length, text_config.indexer_budget + 2 * text_config.indexer_compress_ratio + 3))
    prompts = [Prompt(f"random ids {n}", ids(n)) for n in sorted(lengths)]
    texts: Sequence[str] = TEXTS
    if arguments.prompts is not None:
        texts = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line]
    if tokenizer is None and arguments.prompts is not None:
        raise InteropError("--prompts needs a tokenizer.json in the checkpoint")
    if tokenizer is not None:
        prompts += [Prompt(f"text {n}", tuple(tokenizer.encode(t)), t) for n, t in enumerate(texts, 1)]
    if arguments.image is not None and hasattr(config, "vision_config"):
        place = (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)
        prompts.append(Prompt("image in ids", (*ids(11), *place, *ids(7)), image=True))
    return prompts


def load_picture(file: Path, directory: Path, config: Any) -> Picture:
    """The image file, decoded and with the processor that the checkpoint asks for."""
    settings = directory / "preprocessor_config.json"
    raw = read_object(settings) if settings.exists() else None
    processor = ImageProcessor.from_config(config.vision_config, raw)
    return Picture(file, decode_image(file.read_bytes()), processor)


def engine_tokens(
    directory: Path, prompts: Sequence[Prompt], images: Sequence[Sequence[np.ndarray]] | None,
    *, longest: int, new_tokens: int, dtype: str,
) -> list[list[int]]:  # fmt: skip
    """The engine's greedy tokens, all prompts together."""
    running, context = min(4, len(prompts)), -(-(longest + new_tokens + 1) // 64) * 64
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with Engine(
        str(directory),
        skip_tokenizer_init=True,
        dtype=dtype,
        context_length=context,
        max_running_requests=running,
        max_total_tokens=running * context,
        skip_server_warmup=True,
        compilation_cache_dir="",
    ) as engine:
        results = engine.generate([list(p.ids) for p in prompts], greedy, images=images)
    for result in results:
        if result.finish_reason != "length":
            raise InteropError(f"the engine ended a request with {result.finish_reason!r}")
    return [list(result.token_ids) for result in results]


def compare_model(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The report on one checkpoint.

    Raises:
      InteropError, HybridJaxError: it cannot be compared.
    """
    directory = resolve(name).absolute()
    config = load_config(directory)
    tokenizer: Any = load_tokenizer(directory) if (directory / "tokenizer.json").exists() else None
    prompts = make_prompts(config, tokenizer, arguments)
    picture = None
    if any(prompt.image for prompt in prompts):
        picture = load_picture(arguments.image, directory, config)
    tolerance = arguments.tolerance or TOLERANCE[arguments.dtype]
    report: dict[str, Any] = {
        "model": str(name),
        "dtype": arguments.dtype,
        "tolerance": tolerance,
        "rows": [],
    }
    request = {
        "model": str(directory),
        "dtype": arguments.dtype,
        "new_tokens": arguments.new_tokens,
        "image": None if picture is None else picture.request,
        "prompts": [{"ids": p.ids, "text": p.text, "image": p.image} for p in prompts],
    }
    tensors, facts = ask_transformers(arguments.torch_python, request, arguments.timeout)
    report |= {
        "transformers": facts.get("transformers"),
        "torch": facts.get("torch"),
        "class": facts.get("class"),
    }
    report["unread_tensors"] = json.loads(facts.get("unread_tensors", "[]"))
    vocab = getattr(config, "text_config", config).vocab_size
    answers = [Answers(tensors, i, arguments.new_tokens, vocab) for i in range(len(prompts))]
    for prompt, answer in zip(prompts, answers):
        ids = np.asarray(prompt.ids)
        if picture is not None and prompt.image:
            grid = picture.processor.grid(*picture.pixels.shape[:2])
            ids = expand_placeholders(
                ids, [grid], config.image_token_id, config.vision_config.spatial_merge_size
            )
        if not np.array_equal(ids, answer.ids):
            raise InteropError(
                f"{prompt.name}: {len(answer.ids)} ids come back for {len(ids)}, or other ones"
            )
    generated: list[Any] = [None] * len(prompts)
    if not arguments.no_engine:
        images = None if picture is None else [[picture.pixels] if p.image else [] for p in prompts]
        generated = engine_tokens(
            directory,
            prompts,
            images,
            longest=max(len(answer.ids) for answer in answers),
            new_tokens=arguments.new_tokens,
            dtype=arguments.dtype,
        )
    model = load_model(directory, arguments.dtype)
    if picture is not None:
        report["image"], features, grid = compare_image(model, picture, tensors, tolerance)
    for prompt, answer, tokens in zip(prompts, answers, generated):
        inputs, wrong = {}, []
        if prompt.image:
            inputs, wrong = image_arguments(config, answer, features, grid)
        row = compare_prompt(
            model,
            prompt,
            answer,
            tokens,
            inputs,
            tolerance=tolerance,
            rounding=SCORE_ROUNDING[arguments.dtype],
        )
        if wrong:
            row |= {"result": DIFFERS, "notes": [*wrong, *row["notes"]]}
        report["rows"].append(row)
    results = [row["result"] for row in (*report["rows"], *filter(None, [report.get("image")]))]
    report["result"] = next((r for r in (DIFFERS, TIE) if r in results), OK)
    return report


def table(report: Mapping[str, Any]) -> str:
    """The report on one checkpoint as text."""
    lines = [f"== {report['model']}"]
    if "error" in report:
        return "\n".join([*lines, f"error: {report['error']}"])
    lines[0] += (
        f": {report['class']}, {report['dtype']}, tolerance {report['tolerance']:g}; "
        f"transformers {report['transformers']}, torch {report['torch']}"
    )
    heads = ("prompt", "tokens", "max error", "median", "argmax", "rows over", "ties", "ties aside", "greedy",
             "engine", "result")  # fmt: skip
    cells: list[tuple[str, ...]] = [heads]
    for row in report["rows"]:
        new = row["greedy"]["new_tokens"]
        engine = row["greedy"].get("engine")
        cells.append(
            (
                row["prompt"],
                str(row["tokens"]),
                f"{row['max_error']:.1e}",
                f"{row['median_error']:.1e}",
                f"{row['argmax_equal']}/{row['tokens']}",
                f"{row['rows_over']}/{row['rows']}",
                f"{row['ties_exact']}+{row['ties_near']}",
                f"{row['max_error_ties_aside']:.1e}",
                f"{row['greedy']['model']}/{new}",
                "-" if engine is None else f"{engine}/{new}",
                row["result"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *rest in cells:
        lines.append(first.ljust(widths[0]) + "".join(f"  {c:>{w}}" for c, w in zip(rest, widths[1:])))
    if image := report.get("image"):
        lines.append(
            f"image {image['image']}: {image['patches']} patches, largest difference of a pixel value "
            f"{image['max_pixel_difference']:.1e}; {image['features']} features, max error "
            f"{image['max_error']:.1e}, median {image['median_error']:.1e}: {image['result']}"
        )
        lines += [f"  image: {note}" for note in image["notes"]]
    for row in report["rows"]:
        lines += [f"  {row['prompt']}: {note}" for note in row["notes"]]
    if report["unread_tensors"]:
        names = report["unread_tensors"]
        lines.append(f"  transformers reads {len(names)} tensors not: {', '.join(names[:3])} ...")
    return "\n".join(lines)


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares checkpoints between transformers and hybridjax.")
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL_DIR", help="checkpoint directory or bundled model")
    add("--torch-python", required=True, help="a Python with torch, transformers and safetensors")
    add("--length", type=int, default=96, help="tokens of the longest random prompt, unless the indexer's "
        "budget asks for a longer one")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE", help="texts to use, one per line (needs a tokenizer)")
    add("--new-tokens", type=int, default=32, help="greedy tokens per prompt")
    add("--dtype", choices=sorted(TOLERANCE), default="float32")
    add("--tolerance", type=float, help="on the relative error of a row of logits (default: "
        + ", ".join(f"{name} {value:g}" for name, value in TOLERANCE.items()) + ")")  # fmt: skip
    add("--image", type=Path, metavar="FILE", help="an image for models that take images")
    add("--seed", type=int, default=0, help="of the random prompts")
    add("--timeout", type=float, default=3600, help="seconds that transformers may take per model")
    add("--no-engine", action="store_true", help="compare the model alone")
    arguments = parser.parse_args(argv)
    for name in ("length", "new_tokens", "timeout", "tolerance"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    for name in ("prompts", "image"):
        file = getattr(arguments, name)
        if file is not None and not file.is_file():
            parser.error(f"--{name}: {file} is no file")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    reports = []
    for name in arguments.models:
        try:
            report = compare_model(name, arguments)
        except (InteropError, HybridJaxError) as error:
            report = {"model": name, "error": str(error), "result": "error"}
        reports.append(report)
        print(table(report), flush=True)
    versions = {"hybridjax": hybridjax.__version__, "jax": jax.__version__}
    print(
        json.dumps(
            _finite({"interop": reports, "device": jax.default_backend(), **versions}), allow_nan=False
        )
    )
    results = {report["result"] for report in reports}
    return 1 if DIFFERS in results else 2 if "error" in results else 0


if __name__ == "__main__":
    sys.exit(main())
