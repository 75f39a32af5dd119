"""How a kernel divides its work: what a call names, else what was measured, else a rule of thumb.

Measurements are in ``tunings/<architecture>.json``, one file per GPU generation:

    {"architecture": "sm_90", "processors": 132, "measured_on": "NVIDIA H200",
     "sources": {"simple_gla_decode": "benchmarks/results/h200_kernels.txt"},
     "ops": {"simple_gla_decode": [
        {"states_at_most": 264, "options": {"columns": 32, "stages": 1, "resident": null}},
        {"options": {"columns": 64, "stages": 1, "resident": null}}]}}

The first entry whose conditions hold is taken: a name of the op's shape key must equal the number, a name
with ``_at_most`` must not exceed it. A table counts only for GPUs with as many multiprocessors as the one it
was measured on. This module knows names and numbers, no kernel; ``benchmarks.kernels --tune`` writes entries.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.json_files import read_object

FOLDER = Path(__file__).with_name("tunings")
_AT_MOST = "_at_most"

Options = Mapping[str, int | None]


@dataclasses.dataclass(frozen=True)
class Space:
    """What may be said of an op: the numbers that a shape has, and what each option may be."""

    shape: tuple[str, ...]
    options: Mapping[str, tuple[int | None, ...]]


_FEW = tuple(range(1, 9))
_STATES = Space(("states",), {"columns": (32, 64, 128), "stages": _FEW, "resident": (None, *range(1, 17))})
_PROMPT = ("tokens", "sequences", "heads")

SPACES: Mapping[str, Space] = {
    "simple_gla_decode": _STATES,
    "gated_delta_decode": _STATES,
    "recurrent_commit": _STATES,
    "simple_gla_prefill": Space(_PROMPT, {"columns": (32, 64), "stages": _FEW}),
    "gated_delta_prefill": Space(_PROMPT, {"stages": _FEW}),
    "nvfp4_product": Space(
        ("tokens", "columns", "features", "blocks"),
        {"rows": (64, 128), "splits": tuple(range(1, 65)), "stages": _FEW},
    ),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Options of a kernel and where they come from.

    Attributes:
      options: every option of the op.
      source: "explicit" as soon as a call names one of them, "table" or "heuristic".
      where: the entry of the table ("sm_90.json: simple_gla_decode[0]"), empty if there is none.
    """

    options: dict[str, Any]
    source: str
    where: str = ""


def choose(
    op: str,
    architecture: str,
    processors: int,
    shape: Mapping[str, int],
    *,
    heuristic: Callable[[], Options],
    override: Options | None = None,
) -> Choice:
    """The options of a kernel: explicit ones, then those of the table, then those of the heuristic.

    Args:
      op: one of SPACES.
      architecture: such as "sm_90", see ``ops.dispatch.architecture``.
      processors: multiprocessors of the GPU.
      shape: the numbers of the op's shape key.
      heuristic: called where the table says nothing.
      override: options by name; what it leaves out, or None for all, is chosen.

    Raises:
      ConfigError: an unknown op, a shape or override with other names than the op's, an option with a value
        that is not allowed, or a broken table.
    """
    space = _space(op)
    if set(shape) != set(space.shape):
        raise ConfigError(f"{op}: shape names {sorted(shape)}; it has {sorted(space.shape)}")
    given = dict(override or {})
    _check_options(f"override of {op}", given, space, complete=False)
    if set(given) == set(space.options):
        return Choice(given, "explicit")
    found = lookup(op, architecture, processors, shape)
    chosen = found or Choice(dict(heuristic()), "heuristic")
    if not given:
        return chosen
    return Choice({**chosen.options, **given}, "explicit", chosen.where)


def lookup(op: str, architecture: str, processors: int, shape: Mapping[str, int]) -> Choice | None:
    """What the table of an architecture says of a shape, if anything; arguments as those of ``choose``."""
    table = load(architecture)
    if table is None or table["processors"] != processors:
        return None
    for index, entry in enumerate(table["ops"].get(op, ())):
        if all(_holds(name, number, shape) for name, number in entry.items() if name != "options"):
            return Choice(dict(entry["options"]), "table", f"{architecture}.json: {op}[{index}]")
    return None


def _holds(condition: str, number: int, shape: Mapping[str, int]) -> bool:
    if condition.endswith(_AT_MOST):
        return shape[condition.removesuffix(_AT_MOST)] <= number
    return shape[condition] == number


@functools.cache
def load(architecture: str) -> dict[str, Any] | None:
    """The checked table of an architecture; None where none is shipped.

    Raises:
      ConfigError: see ``read``.
    """
    file = FOLDER / f"{architecture}.json"
    if not file.exists():
        return None
    table = read(file)
    if table["architecture"] != architecture:
        raise ConfigError(
            f"{file}: architecture is {table['architecture']!r}; its name says {architecture!r}"
        )
    return table


def read(file: Path) -> dict[str, Any]:
    """A table from a file.

    Raises:
      ConfigError: it is missing, not JSON, or something in it is unknown or not allowed: file, field and
        value are named.
    """
    try:
        table = read_object(file)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    check(table, str(file))
    return table


def check(table: Mapping[str, Any], file: str) -> None:
    """Raises ConfigError, naming ``file``, field and value, where a table is not one; see the module."""
    kinds = {"architecture": str, "processors": int, "measured_on": str, "sources": dict, "ops": dict}
    for name in table.keys() | kinds.keys():
        if name not in kinds:
            raise ConfigError(f"{file}: unknown field {name!r}; known: {', '.join(kinds)}")
        if type(table.get(name)) is not kinds[name]:
            raise ConfigError(
                f"{file}: {name} is {table.get(name)!r}; it must be of type {kinds[name].__name__}"
            )
    for op, entries in table["ops"].items():
        where = f"{file}: ops.{op}"
        space = _space(op, where)
        if not isinstance(table["sources"].get(op), str):
            raise ConfigError(
                f"{file}: sources.{op} is {table['sources'].get(op)!r}; say where it was measured"
            )
        if not isinstance(entries, list):
            raise ConfigError(f"{where} is {entries!r}; it must be a list of entries")
        for index, entry in enumerate(entries):
            _check_entry(f"{where}[{index}]", entry, space)
            if entry.keys() == {"options"} and index + 1 < len(entries):
                raise ConfigError(f"{where}[{index}] has no condition, so that no entry behind it is reached")
    if extra := table["sources"].keys() - table["ops"].keys():
        raise ConfigError(f"{file}: sources names {', '.join(sorted(extra))}; ops has no such op")


def _space(op: str, where: str = "") -> Space:
    if op not in SPACES:
        raise ConfigError(f"{where or 'tuning'}: unknown op {op!r}; known: {', '.join(SPACES)}")
    return SPACES[op]


def _check_entry(where: str, entry: Any, space: Space) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("options"), dict):
        raise ConfigError(f"{where} is {entry!r}; it must be an object with options")
    allowed = [name + end for name in space.shape for end in ("", _AT_MOST)]
    for name, number in entry.items():
        if name == "options":
            continue
        if name not in allowed:
            raise ConfigError(f"{where}: unknown condition {name!r}; known: {', '.join(allowed)}")
        if type(number) is not int or number < 1:
            raise ConfigError(f"{where}.{name} is {number!r}; it must be a positive integer")
    _check_options(f"{where}.options", entry["options"], space, complete=True)


def _check_options(where: str, options: Mapping[str, Any], space: Space, complete: bool) -> None:
    for name, value in options.items():
        if name not in space.options:
            raise ConfigError(f"{where}: unknown option {name!r}; known: {', '.join(space.options)}")
        allowed = space.options[name]
        if isinstance(value, bool) or value not in allowed:
            names = ", ".join(json.dumps(x) for x in allowed)
            raise ConfigError(f"{where}.{name} is {value!r}; allowed: {names}")
    if complete and (missing := space.options.keys() - options.keys()):
        raise ConfigError(f"{where} lacks {', '.join(sorted(missing))}")


def entries(
    measured: Iterable[tuple[Mapping[str, int], Options, float]],
    along: str,
    exact: tuple[str, ...] = (),
    tolerance: float = 0.01,
) -> list[dict[str, Any]]:
    """Entries of a table from measured times.

    Args:
      measured: shape, options and time of each variant that was timed.
      along: the name of the shape key that entries bound from above; the last of a group is unbounded.
      exact: names that must be equal for an entry to count; the others of the shape key are left out.
      tolerance: a smaller size's choice is kept where it is slower by at most this share.
    """
    groups: dict[tuple[int, ...], dict[int, list[tuple[float, Options]]]] = {}
    for shape, options, time in measured:
        sizes = groups.setdefault(tuple(shape[name] for name in exact), {})
        sizes.setdefault(shape[along], []).append((time, options))
    found = []
    for group, sizes in sorted(groups.items()):
        chosen: list[tuple[int, Options]] = []
        for size, timed in sorted(sizes.items()):
            least, best = min(timed, key=lambda pair: pair[0])
            if chosen and any(o == chosen[-1][1] and t <= (1 + tolerance) * least for t, o in timed):
                best = chosen.pop()[1]
            elif chosen and best == chosen[-1][1]:
                chosen.pop()
            chosen.append((size, best))
        for index, (size, options) in enumerate(chosen):
            bound = {along + _AT_MOST: size} if index + 1 < len(chosen) else {}
            found.append({**dict(zip(exact, group)), **bound, "options": dict(options)})
    return found


def text(table: Mapping[str, Any]) -> str:
    """A table as JSON, one entry a line."""
    head = {name: value for name, value in table.items() if name != "ops"}
    ops = []
    for op, listed in table["ops"].items():
        inner = ",\n".join("      " + json.dumps(entry, ensure_ascii=False) for entry in listed)
        ops.append(f"    {json.dumps(op)}: [\n{inner}\n    ]")
    start = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return start + ',\n  "ops": {\n' + ",\n".join(ops) + "\n  }\n}\n"


def write(file: Path, table: Mapping[str, Any]) -> None:
    """Checks a table, then writes it; ConfigError as of ``check``."""
    check(table, str(file))
    file.write_text(text(table), encoding="utf-8")
