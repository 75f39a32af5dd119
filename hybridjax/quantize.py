"""``python -m hybridjax.quantize``: writes a model's checkpoint in NVFP4."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridjax.configs.flags import readable_int
from hybridjax.errors import HybridJaxError


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    # What a value may be is said by Settings, so that no list is kept twice; it needs jax.
    parser = argparse.ArgumentParser(
        prog="python -m hybridjax.quantize", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model-path", required=True, metavar="DIR", help="model directory or bundled model")
    add("--output", required=True, type=Path, metavar="DIR", help="directory to create or replace")
    add("--format", default="modelopt", help="modelopt or compressed-tensors (default: modelopt)")
    add("--method", default="gptq", help="gptq, or rtn: rounding to nearest (default: gptq)")
    add(
        "--scale-rule",
        default="mse",
        help="mse, mae, abs_max: each block takes 4 or 6 as its largest code, whichever errs less; static_6, "
        "static_4: all the same (default: mse)",
    )
    add("--calibration", type=Path, metavar="FILE", help="text (.txt), or .jsonl with text or conversations")
    add("--calibration-samples", type=readable_int, default=128, metavar="N", help="at most (default: 128)")
    add(
        "--calibration-length",
        type=readable_int,
        default=2048,
        metavar="N",
        help="tokens of the longest sample; at most the model's context (default: 2048)",
    )
    add("--calibration-lengths", default="fixed", help="fixed or log-uniform (default: fixed)")
    add(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave tensors or modules of such names as they are, e.g. '*.o_proj'; may be repeated",
    )
    add("--damping", type=float, default=0.01, metavar="SHARE", help="of the mean diagonal (default: 0.01)")
    add("--activation-ordering", default="static", help="static or none (default: static)")
    add(
        "--min-expert-tokens",
        type=readable_int,
        metavar="N",
        help="experts that see fewer tokens are rounded (default: 1.5 for each column of their matrix)",
    )
    add("--group-size", type=int, default=16, help=argparse.SUPPRESS)
    add("--weights-only", action="store_true", help="write no input scales: activations stay as they are")
    add("--dtype", help="of the computation (default: the checkpoint's)")
    add(
        "--evaluate",
        type=Path,
        metavar="FILE",
        help="text for perplexities before and after (default: the last tenth of the calibration text)",
    )
    add("--report", type=Path, metavar="FILE", help="JSON (default: <output>.report.json); a .txt beside it")
    add("--restart", action="store_true", help="throw away what a run with other settings has left")
    add("--no-progress", action="store_true", help="show no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Quantises; returns the exit status (2: the request cannot work)."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("hybridjax").setLevel(logging.INFO)
    try:
        print(_run(arguments), end="")
    except HybridJaxError as error:
        print(f"hybridjax.quantize: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last finished layer", file=sys.stderr)
        return 130
    return 0


def _run(arguments: argparse.Namespace) -> str:
    from hybridjax.calibration import Quantization, Settings
    from hybridjax.calibration.report import table

    settings = Settings(
        method=arguments.method,
        scale_rule=arguments.scale_rule,
        skip=tuple(arguments.skip),
        damping=arguments.damping,
        activation_ordering=arguments.activation_ordering,
        min_expert_tokens=arguments.min_expert_tokens,
        calibration_samples=arguments.calibration_samples,
        calibration_length=arguments.calibration_length,
        calibration_lengths=arguments.calibration_lengths,
        weights_only=arguments.weights_only,
        group_size=arguments.group_size,
    )
    quantization = Quantization(
        arguments.model_path,
        arguments.output,
        arguments.format,
        settings,
        calibration=arguments.calibration,
        evaluation=arguments.evaluate,
        dtype=arguments.dtype,
        report_file=arguments.report,
        restart=arguments.restart,
        progress=False if arguments.no_progress else None,
    )
    report = table(quantization.run())
    return f"{report}\n{arguments.output} is written; details are in {quantization.report_file}\n"


if __name__ == "__main__":
    sys.exit(main())
