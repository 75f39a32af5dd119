"""What a quantisation has cost, module by module."""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hybridjax.calibration.perplexity import Perplexity
from hybridjax.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """Sums of squares, as arrays over rows or as their totals; H is the Hessian of the calibration text.

    Attributes:
      size: of the weights w; lost: of their errors d; plain: of those of plain rounding.
      output: w H w^T; output_lost: d H d^T; output_plain: likewise for plain rounding. None without H.
      fours: blocks whose largest value has the code 4; blocks: all.
    """

    size: Any
    lost: Any
    plain: Any
    output: Any = None
    output_lost: Any = None
    output_plain: Any = None
    fours: Any = 0
    blocks: Any = 0


@dataclasses.dataclass(frozen=True)
class Module:
    """A matrix, or the same matrix of all experts of a layer.

    Attributes:
      name: of the tensor, with ``*`` for the experts' numbers.
      method: how it was rounded.
      tokens: rows that it has seen.
      losses: totals.
      experts: rows that each expert has seen.
      rounded_experts: how many of them had too few, or no factor, and were rounded.
    """

    name: str
    method: str
    tokens: int | None
    losses: Losses
    experts: tuple[int, ...] | None = None
    rounded_experts: int = 0

    def row(self) -> dict[str, Any]:
        """For the report; relative errors are roots of ratios of sums of squares."""
        losses = self.losses
        out: dict[str, Any] = {
            "name": self.name,
            "method": self.method,
            "weight_error": _relative(losses.lost, losses.size),
            "weight_error_rtn": _relative(losses.plain, losses.size),
            "output_error": _relative(losses.output_lost, losses.output),
            "output_error_rtn": _relative(losses.output_plain, losses.output),
            "share_of_fours": losses.fours / losses.blocks if losses.blocks else 0.0,
        }
        if self.tokens is not None:
            out["tokens"] = self.tokens
        if self.experts is not None:
            out["tokens_per_expert"] = {
                "least": min(self.experts),
                "median": statistics.median(self.experts),
                "most": max(self.experts),
            }
            out["experts_rounded"] = self.rounded_experts
        return out

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Module":
        experts = raw["experts"]
        changed = {"losses": Losses(**raw["losses"]), "experts": None if experts is None else tuple(experts)}
        return cls(**{**raw, **changed})


def _relative(lost: float | None, whole: float | None) -> float | None:
    if lost is None or whole is None:
        return None
    return (max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0


def build(settings: Mapping[str, Any], modules: Sequence[Module]) -> dict[str, Any]:
    """The content of the report, before perplexities are known."""
    blocks = sum(module.losses.blocks for module in modules)
    return {
        "settings": dict(settings),
        "share_of_fours": sum(module.losses.fours for module in modules) / blocks,
        "perplexity": {},
        "modules": [module.row() for module in modules],
    }


def perplexities(found: Mapping[str, Perplexity]) -> dict[str, Any]:
    """What the evaluations have found, for the report."""
    return {
        name: {
            "tokens": one.tokens,
            "bytes": one.bytes,
            "perplexity": one.perplexity,
            "bits_per_byte": one.bits_per_byte,
            "divergence": one.divergence,
        }
        for name, one in found.items()
    }


def check_writable(file: Path) -> None:
    """Fails now where ``write`` would fail after hours.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
    except OSError as error:
        raise ConfigError(f"report is {file}, which cannot be written: {error}") from error


def write(report: Mapping[str, Any], file: Path) -> None:
    """Writes the report as JSON, and as a table beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    file.with_suffix(".txt").write_text(table(report))


def table(report: Mapping[str, Any]) -> str:
    """The report for people to read."""
    rows = report["modules"]
    width = max(len(row["name"]) for row in rows)
    lines = [
        "Relative errors, of outputs on the calibration text; (rtn): plain rounding under the same scales.",
        f"Blocks whose largest code is 4: {report['share_of_fours']:.1%}",
        "",
        f"{'module':{width}}  {'weight':>7} {'(rtn)':>7}  {'output':>7} {'(rtn)':>7}  {'fours':>6}  tokens",
    ]
    for row in rows:
        tokens = str(row.get("tokens", ""))
        if "tokens_per_expert" in row:
            spread = row["tokens_per_expert"]
            tokens = f"{spread['least']} least, {spread['median']:g} median"
            tokens += f", {row['experts_rounded']} rounded" if row["experts_rounded"] else ""
        lines.append(
            f"{row['name']:{width}}  {_percent(row['weight_error'])} {_percent(row['weight_error_rtn'])}  "
            f"{_percent(row['output_error'])} {_percent(row['output_error_rtn'])}  "
            f"{row['share_of_fours']:6.1%}  {tokens}"
            + ("" if row["method"] in ("gptq", "rtn") else f"  {row['method']}")
        )
    if report["perplexity"]:
        lines += ["", f"{'held-out text':14}  perplexity  bits per byte  divergence  tokens"]
        for name, found in report["perplexity"].items():
            apart = "         -" if found["divergence"] is None else f"{found['divergence']:10.5f}"
            lines.append(
                f"{name:14}  {found['perplexity']:10.4f}  {found['bits_per_byte']:13.4f}  {apart}  "
                f"{found['tokens']}"
            )
        lines.append("divergence: nats per token (Kullback-Leibler) from the predictions before")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.2%}"
