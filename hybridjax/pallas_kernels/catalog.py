"""The kernels: where they are, on which GPUs they ran, and operands to compile them for."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.batch import Batch
from hybridjax.pallas_kernels import state_update, tuning
from hybridjax.pallas_kernels.gated_delta import hopper as gated_delta
from hybridjax.pallas_kernels.nvfp4.kernel import Tuning as NVFP4Tuning
from hybridjax.pallas_kernels.nvfp4.kernel import default_tuning
from hybridjax.pallas_kernels.simple_gla import hopper as simple_gla
from hybridjax.pallas_kernels.state_update import Tuning
from hybridjax.quantization import NVFP4

SIZE, HEADS, KEY_HEADS, VALUE_HEADS = 128, 32, 16, 48


@dataclasses.dataclass(frozen=True)
class Tuned:
    """How the options of a kernel are chosen; see the module ``tuning``.

    Attributes:
      op: its name there.
      shape: the op's shape key, of operands by name.
      heuristic: options for a shape key and a number of multiprocessors.
      along: the name of the key that entries of a table bound from above; ``exact``: those they must equal.
      samples: shape keys to show choices for.
      holder: what a call takes as ``tuning``, made of the options; None: each is an argument by its name.
      operands: of a shape key, where options depend on more of it than ``along``.
    """

    op: str
    shape: Callable[[Mapping[str, Any]], dict[str, int]]
    heuristic: Callable[[Mapping[str, int], int], tuning.Options]
    along: str
    samples: tuple[dict[str, int], ...]
    exact: tuple[str, ...] = ()
    holder: type | None = None
    operands: Callable[[Mapping[str, int]], dict[str, Any]] | None = None

    def choose(self, architecture: str, processors: int, shape: Mapping[str, int]) -> tuning.Choice:
        return tuning.choose(
            self.op, architecture, processors, shape, heuristic=lambda: self.heuristic(shape, processors)
        )

    def arguments(self, options: tuning.Options) -> dict[str, Any]:
        """Static arguments of a call that insists on options."""
        return {"tuning": self.holder(**options)} if self.holder else dict(options)

    def options(self, arguments: Mapping[str, Any]) -> dict[str, int | None]:
        """The options that static arguments insist on."""
        return dataclasses.asdict(arguments["tuning"]) if self.holder else dict(arguments)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of one op.

    Attributes:
      op: the op it implements.
      target: "module:function", its entry, jitted by itself so that equal calls compile once.
      ran: architectures on which it was compared with the definition and timed.
      compiles: architectures that it is compiled for in tests, without a GPU.
      operands: by name, at a shape of a released model; ``options`` are static.
      others: operands of other shapes that it is compiled for.
      variants: static options to try when tuning; tuned: how they are chosen otherwise.
      held: the operand that the program must not copy.
      writes: whether it updates the pool, which is then donated.
      tensor_cores: whether it multiplies on them.
      spills: bytes that its code may spill, as counted by ``aot.report``.
    """

    op: str
    target: str
    ran: tuple[str, ...]
    compiles: tuple[str, ...]
    operands: dict[str, Any]
    options: dict[str, Any]
    others: tuple[dict[str, Any], ...] = ()
    variants: tuple[dict[str, Any], ...] = ()
    tuned: Tuned | None = None
    held: str = "pool"
    writes: bool = True
    tensor_cores: bool = False
    spills: int = 0

    def function(self) -> Callable[..., Any]:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)

    def forms(self, architecture: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Operands and static arguments to compile for 'sm_90a', say: those chosen, those of its table."""
        for operands in (self.operands, *self.others):
            yield operands, self.options
        table = tuning.load(architecture.removesuffix("a"))
        if table is None or (tuned := self.tuned) is None:
            return
        done = []
        for entry in table["ops"].get(tuned.op, ()):
            operands = self.operands
            if tuned.operands:
                said = {name.removesuffix("_at_most"): n for name, n in entry.items() if name != "options"}
                operands = tuned.operands({**tuned.shape(operands), **said})
            form = operands, {**self.options, **tuned.arguments(entry["options"])}
            if form not in done:
                done.append(form)
                yield form


def _of(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_ROWS, _SLOTS = 8, 20
_DECODE = {"slot": _of(jnp.int32, _ROWS), "positions": _of(jnp.int32, _ROWS)}

_NODES, _PATH = 16, 5
_PARTS = ({"parts": 1}, {"parts": 2})

_TOKENS = 2048
_PREFILL = {
    "slot": _of(jnp.int32, 2),
    "tile_sequence": _of(jnp.int32, _TOKENS // 64),
    "positions": _of(jnp.int32, _TOKENS),
}
_TUNINGS = tuple({"tuning": Tuning(*numbers)} for numbers in ((32,), (64,), (32, 3, 4)))


def _simple_gla(*rows: int) -> dict[str, Any]:
    """What every SimpleGLA kernel reads: of tokens that stand in ``rows``, and the pool."""
    return {
        **{name: _of(jnp.bfloat16, *rows, HEADS, SIZE) for name in "qkv"},
        "slopes": _of(jnp.float32, HEADS),
        "pool": _of(jnp.float32, _SLOTS, HEADS, SIZE, SIZE),
    }


def _gated_delta(*rows: int) -> dict[str, Any]:
    """What every gated delta kernel reads, likewise."""
    return {
        **{name: _of(jnp.bfloat16, *rows, KEY_HEADS, SIZE) for name in "qk"},
        "v": _of(jnp.bfloat16, *rows, VALUE_HEADS, SIZE),
        "g": _of(jnp.float32, *rows, VALUE_HEADS),
        "beta": _of(jnp.float32, *rows, VALUE_HEADS),
        "pool": _of(jnp.float32, _SLOTS, VALUE_HEADS, SIZE, SIZE),
    }


def _states(op: str, heads: int) -> Tuned:
    """Of a kernel that updates each state of a pool [slots, heads, 128, 128] once."""

    def heuristic(shape: Mapping[str, int], processors: int) -> tuning.Options:
        return dataclasses.asdict(state_update.heuristic(shape["states"], processors))

    return Tuned(
        op,
        shape=lambda operands: {"states": operands["slot"].shape[0] * operands["pool"].shape[1]},
        heuristic=heuristic,
        along="states",
        samples=tuple({"states": rows * heads} for rows in (1, 8, 64, 256)),
        holder=Tuning,
    )


def _prompts(op: str, heads: int, heuristic: tuning.Options) -> Tuned:
    """Of a chunked prefill kernel, whose options are arguments by name."""

    def shape(operands: Mapping[str, Any]) -> dict[str, int]:
        tokens, sequences = operands["positions"].shape[0], operands["slot"].shape[0]
        return {"tokens": tokens, "sequences": sequences, "heads": operands["pool"].shape[1]}

    return Tuned(
        op,
        shape=shape,
        heuristic=lambda shape, processors: heuristic,
        along="tokens",
        samples=tuple({"tokens": n, "sequences": 1, "heads": heads} for n in (2048, 8192, 32768)),
    )


def _verify(trees: int, nodes: int) -> dict[str, Any]:
    """What every verification reads besides."""
    return {
        "slot": _of(jnp.int32, trees),
        "positions": _of(jnp.int32, trees, nodes),
        "ancestors": _of(jnp.bool_, trees, nodes, nodes),
    }


def _nvfp4(*shape: int) -> NVFP4:
    """Stacked or single matrices [..., N, K] whose rows have global scales of their own."""
    *stack, rows, columns = shape
    arrays: dict[str, Any] = {
        "codes": _of(jnp.uint32, *stack, rows, columns // 8),
        "scales": _of(jnp.float8_e4m3fn, *stack, rows, columns // 16),
        "global_scale": _of(jnp.float32, *stack, rows),
    }
    return NVFP4(**arrays)


def _dense(rows: int, columns: int, features: int) -> dict[str, Any]:
    return {"x": _of(jnp.bfloat16, rows, columns), **vars(_nvfp4(features, columns))}


def _product(operands: Mapping[str, Any]) -> dict[str, int]:
    """The shape key of a dense product of up to 64 rows."""
    rows, columns = operands["x"].shape
    return {"tokens": rows, "columns": columns, "features": operands["codes"].shape[0], "blocks": 1}


_PRODUCT = Tuned(
    "nvfp4_product",
    shape=_product,
    heuristic=lambda shape, processors: dataclasses.asdict(default_tuning(**shape, processors=processors)),
    along="tokens",
    exact=("columns", "features"),
    samples=tuple(
        {"tokens": tokens, "columns": columns, "features": features, "blocks": 1}
        for columns, features in ((4096, 32768), (16384, 4096), (4096, 4096))
        for tokens in (1, 16, 64)
    ),
    holder=NVFP4Tuning,
    operands=lambda shape: _dense(shape["tokens"], shape["columns"], shape["features"]),
)


def _experts(rows: int) -> dict[str, Any]:
    return {
        "x": _of(jnp.bfloat16, rows, 2560),
        "ids": _of(jnp.int32, rows, 10),
        "weights": _of(jnp.float32, rows, 10),
        "gate_up": _nvfp4(512, 1280, 2560),
        "down": _nvfp4(512, 2560, 640),
    }


_WIDTH, _VALUES, _CHANNELS = HEADS * SIZE, VALUE_HEADS * SIZE, (2 * KEY_HEADS + VALUE_HEADS) * SIZE
_LIGHTNING = _of(jnp.bfloat16, _TOKENS, 4 * _WIDTH)
_DELTA_COLUMNS = _CHANNELS + _VALUES + 2 * VALUE_HEADS
_HEAD_NORM, _OUT_NORM = _of(jnp.bfloat16, SIZE), _of(jnp.bfloat16, _WIDTH)
_EPS = 1e-6
_DELTA_WEIGHTS = {
    "conv_weight": _of(jnp.bfloat16, _CHANNELS, 1, 4),
    "A_log": _of(jnp.float32, VALUE_HEADS),
    "dt_bias": _of(jnp.float32, VALUE_HEADS),
}

_FIELDS: dict[str, Any] = {
    **_PREFILL,
    "tokens": _of(jnp.int32, _TOKENS),
    "context_length": _of(jnp.int32, 2),
    "page_table": _of(jnp.int32, 2, _TOKENS // 64),
    "logit_rows": _of(jnp.int32, 2),
    "initial_slot": _of(jnp.int32, 2),
    "snapshot_slot": _of(jnp.int32, _TOKENS // 64),
}

# Around the recurrences.
_POINTWISE = (
    Kernel(
        op="lightning_rows",
        target="hybridjax.pallas_kernels.pointwise.prompt:lightning_rows",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "projected": _LIGHTNING,
            "q_norm": _HEAD_NORM,
            "k_norm": _HEAD_NORM,
            "positions": _of(jnp.int32, _TOKENS),
        },
        options={"heads": HEADS, "size": SIZE, "eps": _EPS, "theta": 1e4},
        variants=({"group": 4}, {"group": 16}),
        held="projected",
        writes=False,
    ),
    Kernel(
        op="lightning_output",
        target="hybridjax.pallas_kernels.pointwise.prompt:lightning_output",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "out": _of(jnp.float32, _TOKENS, HEADS, SIZE),
            "projected": _LIGHTNING,
            "o_norm": _OUT_NORM,
        },
        options={"eps": _EPS, "gate": True},
        variants=tuple({"stages": stages, "resident": resident} for stages, resident in ((2, 3), (4, 1))),
        held="out",
        writes=False,
    ),
    Kernel(
        op="gated_delta_inputs",
        target="hybridjax.pallas_kernels.pointwise.inputs:gated_delta_inputs",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "projected": _of(jnp.bfloat16, _TOKENS, _DELTA_COLUMNS),
            **_DELTA_WEIGHTS,
            "batch": Batch(**_FIELDS),
            "pool": _of(jnp.bfloat16, _SLOTS, 3, _CHANNELS),
        },
        options={"key_heads": KEY_HEADS, "key_size": SIZE, "value_size": SIZE},
        variants=({"together": 4}, {"together": 16}),
    ),
    Kernel(
        op="gated_delta_output",
        target="hybridjax.pallas_kernels.pointwise.prompt:gated_delta_output",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "out": _of(jnp.float32, _TOKENS, VALUE_HEADS, SIZE),
            "projected": _of(jnp.bfloat16, _TOKENS, _DELTA_COLUMNS),
            "norm": _HEAD_NORM,
        },
        options={"first": _CHANNELS, "eps": _EPS, "activation": "sigmoid"},
        held="out",
        writes=False,
    ),
    Kernel(
        op="lightning_decode",
        target="hybridjax.pallas_kernels.pointwise.lightning:decode",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "projected": _of(jnp.bfloat16, _ROWS, 4 * _WIDTH),
            "q_norm": _HEAD_NORM,
            "k_norm": _HEAD_NORM,
            "o_norm": _OUT_NORM,
            "slopes": _of(jnp.float32, HEADS),
            "pool": _of(jnp.float32, _SLOTS, HEADS, SIZE, SIZE),
            **_DECODE,
        },
        options={"scale": SIZE**-0.5, "eps": _EPS, "theta": 1e4, "gate": True},
        variants=_TUNINGS,
    ),
    Kernel(
        op="gated_delta_net_decode",
        target="hybridjax.pallas_kernels.pointwise.gated_delta_net:decode",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "projected": _of(jnp.bfloat16, _ROWS, _DELTA_COLUMNS),
            **_DELTA_WEIGHTS,
            "norm": _HEAD_NORM,
            "pool": _of(jnp.float32, _SLOTS, VALUE_HEADS, SIZE, SIZE),
            "conv": _of(jnp.bfloat16, _SLOTS, 3, _CHANNELS),
            **_DECODE,
        },
        options={"key_heads": KEY_HEADS, "eps": _EPS, "activation": "sigmoid"},
        variants=_TUNINGS,
    ),
)

KERNELS = (
    Kernel(
        op="simple_gla_decode",
        target="hybridjax.pallas_kernels.simple_gla.decode:decode",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            **_simple_gla(_ROWS),
            **_DECODE,
        },
        options={"scale": SIZE**-0.5},
        variants=_TUNINGS,
        tuned=_states("simple_gla_decode", HEADS),
    ),
    Kernel(
        op="gated_delta_decode",
        target="hybridjax.pallas_kernels.gated_delta.decode:decode",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            **_gated_delta(_ROWS),
            **_DECODE,
        },
        options={},
        variants=_TUNINGS,
        tuned=_states("gated_delta_decode", VALUE_HEADS),
    ),
    Kernel(
        op="simple_gla_prefill",
        target="hybridjax.pallas_kernels.simple_gla.hopper:prefill",
        ran=("sm_90",),
        compiles=("sm_90a",),
        operands={
            **_simple_gla(_TOKENS),
            **_PREFILL,
        },
        tensor_cores=True,
        options={"scale": SIZE**-0.5},
        variants=tuple(
            {"columns": columns, "stages": stages} for columns, stages in ((32, 2), (32, 4), (64, 2))
        ),
        tuned=_prompts("simple_gla_prefill", HEADS, simple_gla.HEURISTIC),
    ),
    Kernel(
        op="gated_delta_prefill",
        target="hybridjax.pallas_kernels.gated_delta.hopper:prefill",
        ran=("sm_90",),
        compiles=("sm_90a",),
        operands={
            **_gated_delta(_TOKENS),
            **_PREFILL,
        },
        tensor_cores=True,
        options={},
        variants=tuple({"stages": stages} for stages in (2, 3)),
        tuned=_prompts("gated_delta_prefill", VALUE_HEADS, gated_delta.HEURISTIC),
    ),
    Kernel(
        op="simple_gla_verify",
        target="hybridjax.pallas_kernels.tree_verify:simple_gla",
        ran=("sm_90",),
        compiles=("sm_90a",),
        operands={
            **_simple_gla(_ROWS, _NODES),
            **_verify(_ROWS, _NODES),
        },
        others=({**_simple_gla(1, 64), **_verify(1, 64)},),
        variants=_PARTS,
        tensor_cores=True,
        options={"scale": SIZE**-0.5},
        writes=False,
    ),
    Kernel(
        op="gated_delta_verify",
        target="hybridjax.pallas_kernels.tree_verify:gated_delta",
        ran=("sm_90",),
        compiles=("sm_90a",),
        operands={
            **_gated_delta(_ROWS, _NODES),
            **_verify(_ROWS, _NODES),
        },
        others=tuple({**_gated_delta(1, n), **_verify(1, n)} for n in (_NODES, 64)),
        variants=_PARTS,
        tensor_cores=True,
        options={},
        writes=False,
    ),
    Kernel(
        op="recurrent_commit",
        target="hybridjax.pallas_kernels.tree_commit:commit",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands={
            "k": _of(jnp.bfloat16, _ROWS, _NODES, KEY_HEADS, SIZE),
            "d": _of(jnp.float32, _ROWS, _NODES, VALUE_HEADS, SIZE),
            "g": _of(jnp.float32, _ROWS, _NODES, VALUE_HEADS),
            "pool": _of(jnp.float32, _SLOTS, VALUE_HEADS, SIZE, SIZE),
            "slot": _of(jnp.int32, _ROWS),
            "positions": _of(jnp.int32, _ROWS, _NODES),
            "path": _of(jnp.int32, _ROWS, _PATH),
        },
        options={},
        variants=_TUNINGS,
        tuned=_states("recurrent_commit", VALUE_HEADS),
    ),
    Kernel(
        op="nvfp4_w4a16",
        target="hybridjax.pallas_kernels.nvfp4.dense:w4a16",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands=_dense(1, 4096, 32768),
        options={},
        others=(
            _dense(8, 16384, 4096),
            _dense(16, 4096, 4096),
            _dense(32, 4096, 4096),
            _dense(64, 4096, 16384),
        ),
        variants=tuple(
            {"tuning": NVFP4Tuning(*numbers)}
            for numbers in (
                *((64, 1, stages) for stages in (2, 3, 4, 6)),
                *((64, splits, 3) for splits in (2, 4, 8)),
                *((128, splits, stages) for splits in (1, 2, 4) for stages in (3, 5)),
            )
        ),
        tuned=_PRODUCT,
        held="codes",
        writes=False,
        tensor_cores=True,
    ),
    Kernel(
        op="nvfp4_experts",
        target="hybridjax.pallas_kernels.nvfp4.grouped:experts",
        ran=("sm_90",),
        compiles=("sm_90a", "sm_100a", "sm_120a"),
        operands=_experts(1),
        options={},
        others=(_experts(64), _experts(2048)),
        variants=tuple(
            {"tunings": (NVFP4Tuning(64, splits, stages), NVFP4Tuning(64, 1, 1))}
            for splits in (1, 2, 5)
            for stages in (2, 4)
        ),
        held="gate_up",
        writes=False,
        tensor_cores=True,
    ),
    *_POINTWISE,
)


def by_name(op: str) -> Kernel:
    """The kernel of an op.

    Raises:
      KeyError: the op has none.
    """
    return {kernel.op: kernel for kernel in KERNELS}[op]
