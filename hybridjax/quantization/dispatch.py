"""Whether a product with NVFP4 weights rounds its activations, too (minicpm_sala 4.6)."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ACTIVATIONS = ("auto", "by_rows", "w4a16", "w4a4")

BLACKWELL = frozenset({"sm_100", "sm_103", "sm_120", "sm_121"})
_TABLE = Path(__file__).with_name("crossover.json")


def activation_format(
    activations: str, rows: int, shape: tuple[int, int], calibrated: bool, architecture: str
) -> str:
    """ "w4a16" or "w4a4".

    Args:
      activations: "w4a16" or "w4a4": that; "by_rows": W4A4 for more rows than the crossover; "auto": the
        same where tensor cores multiply FP4, W4A16 elsewhere, since W4A4 is emulated there.
      rows: of the activations, padding included.
      shape: (N, K) of the weight.
      calibrated: whether there is an input scale.
      architecture: such as "sm_90", see ``ops.dispatch.architecture``.

    Raises:
      ValueError: ``activations`` is none of ACTIVATIONS, or "w4a4" without an input scale.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations is {activations!r}; allowed: {', '.join(ACTIVATIONS)}")
    if activations == "w4a4" and not calibrated:
        raise ValueError("W4A4 needs input scales, which these weights have not: calibrate them")
    if activations in ("w4a16", "w4a4"):
        return activations
    if not calibrated or (activations == "auto" and architecture not in BLACKWELL):
        return "w4a16"
    return "w4a4" if rows > crossover(architecture, shape) else "w4a16"


def crossover(architecture: str, shape: tuple[int, int]) -> int:
    """Rows up to which W4A16 is the faster one for a weight (N, K)."""
    table = _table()
    measured: Mapping[str, int] = table["architectures"].get(architecture, {})
    return measured.get(f"{shape[0]}x{shape[1]}", table["default"])


@functools.cache
def _table() -> Mapping[str, Any]:
    return json.loads(_TABLE.read_text())
