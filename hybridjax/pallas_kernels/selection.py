"""Which implementation of an op runs where: the choice that the ops make, as a function of its arguments."""

from typing import Any

from hybridjax.ops.dispatch import OPS, assume
from hybridjax.pallas_kernels.aot import GPUS
from hybridjax.pallas_kernels.catalog import KERNELS
from hybridjax.pallas_kernels.tuning import SPACES

ARCHITECTURES = ("cpu", "tpu", "sm_80", "sm_90", "sm_100", "sm_120")


def select(op: str, architecture: str, *args: Any, override: str | None = None, **kwargs: Any) -> str:
    """The name of the implementation of an op for arguments (arrays or shapes with dtypes).

    Args:
      op: name of an op with kernels.
      architecture: 'cpu', 'tpu', or 'sm_' and the compute capability of a GPU.
      override: an implementation to insist on.

    Raises:
      ConfigError: no such implementation; NotImplementedError: it does not support these arguments there.
    """
    with assume(architecture):
        return OPS[op].select(*args, implementation=override, **kwargs)


def table() -> str:
    """The choices at the released shapes: a line per op, a column per architecture.

    A star marks a kernel that compiles for an architecture but never ran on one: it is not chosen there.
    """
    lines: list[tuple[str, ...]] = [("op", *ARCHITECTURES)]
    for kernel in KERNELS:
        row = [kernel.op]
        for architecture in ARCHITECTURES:
            chosen = select(kernel.op, architecture, *kernel.operands.values(), **kernel.options)
            compiled = architecture + "a" in kernel.compiles and architecture not in kernel.ran
            row.append(chosen + "*" * compiled)
        lines.append(tuple(row))
    note = "*: a kernel compiles for this GPU but has not run on one, so it is not used."
    return "\n".join([*_aligned(lines), "", note])


def tunings() -> str:
    """How kernels divide their work at sample shapes, and where that comes from: a column per GPU.

    Options stand in the order of their names, "-" for none; "table[1]" is an entry of the GPU's table.
    """
    gpus = {name.removesuffix("a"): gpu.multiprocessors for name, gpu in GPUS.items()}
    lines: list[tuple[str, ...]] = [
        ("op", "shape", "options", *(f"{name} x {n}" for name, n in gpus.items()))
    ]
    for kernel in KERNELS:
        if not (tuned := kernel.tuned):
            continue
        names = SPACES[tuned.op].options
        for shape in tuned.samples:
            cells = []
            for architecture, processors in gpus.items():
                with assume(architecture):
                    chosen = tuned.choose(architecture, processors, shape)
                values = ("-" if chosen.options[x] is None else str(chosen.options[x]) for x in names)
                entry = chosen.where[chosen.where.find("[") :] if chosen.where else ""
                compiled = architecture + "a" in kernel.compiles
                cells.append(f"{'/'.join(values)} {chosen.source}{entry}" if compiled else "")
            said = " ".join(f"{name}={number}" for name, number in shape.items())
            lines.append((kernel.op, said, "/".join(names), *cells))
    return "\n".join(_aligned(lines))


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
