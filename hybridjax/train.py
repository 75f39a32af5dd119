"""``python -m hybridjax.train``: prepares data, trains registered experiments, evaluates models."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridjax.errors import HybridJaxError
from hybridjax.training.config import ExperimentConfig
from hybridjax.training.experiments import EXPERIMENTS, describe, override

log = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="hybridjax-train", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="list the experiments")
    action.add_argument("--experiment", metavar="NAME", help="train this experiment")
    action.add_argument(
        "--prepare-data", type=Path, metavar="DIR", help="fetch the corpus, write tokenizer and token files"
    )
    action.add_argument(
        "--evaluate", type=Path, metavar="DIR", help="held-out bits per byte of a pretrained directory"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="replace a field of the experiment, e.g. optimizer.learning_rate=1e-3; may be repeated",
    )
    parser.add_argument("--show", action="store_true", help="print the experiment's settings, do not train")
    parser.add_argument("--data", metavar="DIR", help="prepared data (default: the experiment's)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/<experiment>")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the trained model here")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument(
        "--max-seconds", type=float, metavar="S", help="start no step after S seconds; write a checkpoint"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where downloads are kept (--prepare-data)")
    parser.add_argument("--vocab-size", type=int, default=2048, help="of the tokenizer (--prepare-data)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (2: the request cannot work)."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    # Orbax logs a dozen lines per checkpoint at this level.
    logging.getLogger("hybridjax").setLevel(logging.INFO)
    try:
        if arguments.list:
            print(describe())
        elif arguments.prepare_data:
            _prepare(arguments)
        elif arguments.evaluate:
            _evaluate(arguments)
        else:
            _train(arguments)
    except HybridJaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _prepare(arguments: argparse.Namespace) -> None:
    from hybridjax.training.data import prepare

    cache = arguments.cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "hybridjax/corpus")
    data = prepare(arguments.prepare_data, cache.expanduser(), vocab_size=arguments.vocab_size)
    summary = {k: v for k, v in data.info.items() if k != "heldout_documents"}
    summary["heldout"] = {
        "documents": len(data.documents),
        "tokens": len(data.heldout),
        "bytes": len(data.text),
    }
    print(json.dumps(summary, indent=1))


def _experiment(arguments: argparse.Namespace) -> ExperimentConfig:
    config = EXPERIMENTS[arguments.experiment]()
    changes = list(arguments.set)
    if arguments.data:
        changes.append(f"data.directory={arguments.data}")
    return override(config, *changes)


def _train(arguments: argparse.Namespace) -> None:
    config = _experiment(arguments)
    if arguments.show:
        print(config)
        return
    from hybridjax.training.data import load_prepared
    from hybridjax.training.report import check_output, write_pretrained
    from hybridjax.training.trainer import Trainer, headline, stop_on_signals

    if arguments.output:
        check_output(arguments.output)
    run_dir = arguments.run_dir or Path("runs", config.name)
    trainer = Trainer(config, load_prepared(Path(config.data.directory)))
    with stop_on_signals() as stop:
        result = trainer.run(run_dir, resume=arguments.resume, max_seconds=arguments.max_seconds, stop=stop)
        if arguments.output:
            report = write_pretrained(trainer, result, arguments.output)
            log.info("%s: %s", arguments.output, headline(report["heldout"]))


def _evaluate(arguments: argparse.Namespace) -> None:
    from hybridjax.training.data import load_prepared
    from hybridjax.training.report import evaluate_pretrained

    settings = override(EXPERIMENTS["tiny_sala"](), *arguments.set).data
    data = load_prepared(Path(arguments.data or settings.directory))
    print(json.dumps(evaluate_pretrained(arguments.evaluate, data, settings), indent=1))


if __name__ == "__main__":
    sys.exit(main())
