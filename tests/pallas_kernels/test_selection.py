"""Which implementation runs where: a function of op, architecture and shapes."""

import functools
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hybridjax.errors import ConfigError
from hybridjax.ops import simple_gla_decode
from hybridjax.ops.dispatch import architecture, assume
from hybridjax.pallas_kernels import tuning
from hybridjax.pallas_kernels.catalog import KERNELS, by_name
from hybridjax.pallas_kernels.selection import ARCHITECTURES, select, table, tunings
from hybridjax.pallas_kernels.state_update import Tuning, choose


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.op)
def test_kernels_are_chosen_where_they_ran_and_nowhere_else(kernel):
    for where in ARCHITECTURES:
        chosen = select(kernel.op, where, *kernel.operands.values(), **kernel.options)
        assert (chosen == "mosaic_gpu") == (where in kernel.ran)
        assert where in kernel.ran or chosen in ("xla", "reference")


RECURRENT = [kernel for kernel in KERNELS if "pool" in kernel.operands and {"v", "d"} & {*kernel.operands}]


@pytest.mark.parametrize("kernel", RECURRENT, ids=lambda kernel: kernel.op)
def test_other_heads_and_dtypes_of_the_pool_are_left_to_xla_or_refused_by_name(kernel):
    values = "v" if "v" in kernel.operands else "d"
    for name, change in {
        "pool": lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        values: lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], 64), x.dtype),
    }.items():
        operands = {**kernel.operands, name: change(kernel.operands[name])}
        assert select(kernel.op, "sm_90", *operands.values(), **kernel.options) != "mosaic_gpu"
        with pytest.raises(NotImplementedError, match=r"on sm_90: bfloat16\[") as refused:
            select(kernel.op, "sm_90", *operands.values(), override="mosaic_gpu", **kernel.options)
        assert f"{operands[name].dtype}{list(operands[name].shape)}" in str(refused.value)


def test_float32_prompts_keep_full_products():
    kernel = by_name("simple_gla_prefill")
    wide = [jax.ShapeDtypeStruct(kernel.operands[x].shape, jnp.float32) for x in "qkv"]
    rest = list(kernel.operands.values())[3:]
    assert select(kernel.op, "sm_90", *wide, *rest, **kernel.options) == "xla"


def test_an_override_wins_and_must_exist():
    kernel = by_name("simple_gla_prefill")
    args = kernel.operands.values()
    assert select(kernel.op, "sm_90", *args, override="xla", **kernel.options) == "xla"
    with pytest.raises(ConfigError, match="no implementation 'triton'"):
        select(kernel.op, "sm_90", *args, override="triton", **kernel.options)


def test_the_table_names_every_kernel_and_marks_those_that_only_compile():
    lines = table().splitlines()
    assert lines[0].split() == ["op", *ARCHITECTURES]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1 : 1 + len(KERNELS)]}
    assert set(rows) == {kernel.op for kernel in KERNELS}
    assert rows["simple_gla_decode"] == ["reference"] * 3 + ["mosaic_gpu", "reference*", "reference*"]


def test_assuming_a_gpu_changes_the_choice_only_inside():
    with assume("sm_90"):
        assert architecture() == "sm_90"
        operands = by_name("simple_gla_decode").operands.values()
        assert simple_gla_decode.select(*operands, scale=1.0) == "mosaic_gpu"
    assert architecture() == jax.default_backend() or architecture().startswith("sm_")


def test_few_states_are_cut_finer():
    assert [choose("recurrent_commit", rows, 32, 132).columns for rows in (1, 8, 9, 256)] == [32, 32, 64, 64]


def test_a_decode_kernel_takes_what_it_is_told_else_the_table_of_its_gpu(monkeypatch):
    asked = []

    def lookup(op, architecture, processors, shape):
        asked.append((op, architecture, processors, shape))
        return tuning.Choice({"columns": 128, "stages": 2, "resident": 4}, "table")

    monkeypatch.setattr(tuning, "lookup", lookup)
    with assume("sm_90"):
        assert choose("gated_delta_decode", 3, 48, 132) == Tuning(128, 2, 4)
        assert asked == [("gated_delta_decode", "sm_90", 132, {"states": 144})]
        assert choose("gated_delta_decode", 3, 48, 132, Tuning(32)) == Tuning(32, 1, None)


def test_chosen_tunings_are_shown_with_their_source():
    lines = tunings().splitlines()
    assert lines[0].split() == "op shape options sm_90 x 132 sm_100 x 148 sm_120 x 188".split()
    shown = {tuple(line.split()[:2]): line.split()[2:] for line in lines[1:]}
    few, many = shown["simple_gla_decode", "states=256"], shown["simple_gla_decode", "states=2048"]
    assert few == ["columns/stages/resident", "32/1/-", "table[0]"] + ["32/1/-", "heuristic"] * 2
    assert many == ["columns/stages/resident", "64/1/-", "table[1]"] + ["64/1/-", "heuristic"] * 2
    assert {op for op, _ in shown} == {kernel.op for kernel in KERNELS if kernel.tuned}


TUNED = [kernel for kernel in KERNELS if kernel.tuned]


@pytest.mark.parametrize("kernel", TUNED, ids=lambda kernel: kernel.op)
def test_an_entry_takes_every_option_that_may_be_tuned(kernel):
    space = tuning.SPACES[kernel.tuned.op]
    assert set(kernel.tuned.shape(kernel.operands)) == set(space.shape)
    assert {kernel.tuned.along, *kernel.tuned.exact} <= set(space.shape)
    chosen = kernel.tuned.choose("sm_90", 132, kernel.tuned.shape(kernel.operands))
    assert set(chosen.options) == set(space.options)
    assert kernel.tuned.options(kernel.tuned.arguments(chosen.options)) == chosen.options
    for variant in kernel.variants:
        override = kernel.tuned.options(variant)
        tuning.choose(
            kernel.tuned.op, "cpu", 1, kernel.tuned.shape(kernel.operands), heuristic=dict, override=override
        )


@pytest.mark.parametrize("file", sorted(tuning.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_kernels_accept_what_shipped_tables_say(file):
    """Lowered for the GPU, which refuses tiles that do not fit its memory; a GPU is not needed."""
    tuned = {op for op, entries in tuning.read(file)["ops"].items() if entries}
    lowered = set()
    for kernel in TUNED:
        for operands, options in kernel.forms(file.stem + "a"):
            if options == kernel.options or file.stem + "a" not in kernel.compiles:
                continue
            with assume(file.stem):
                traced = jax.jit(functools.partial(kernel.function(), **options)).trace(**operands)
                assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
            lowered.add(kernel.tuned.op)
    assert lowered == tuned


def test_an_entry_that_a_kernel_refuses_would_be_found():
    kernel = by_name("simple_gla_decode")
    with pytest.raises(ValueError, match="exceeds available shared memory"), assume("sm_90"):
        function = functools.partial(kernel.function(), **kernel.options, tuning=Tuning(128, 8, 1))
        operands = {**kernel.operands, "slot": jax.ShapeDtypeStruct((64,), jnp.int32)}
        operands |= {x: jax.ShapeDtypeStruct((64, *operands[x].shape[1:]), jnp.bfloat16) for x in "qkv"}
        operands["positions"] = operands["slot"]
        jax.jit(function).trace(**operands).lower(lowering_platforms=("cuda",))


def test_tables_are_part_of_the_package():
    project = Path(__file__).parents[2]
    patterns = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = project / "hybridjax"
    shipped = {file for pattern in patterns["hybridjax"] for file in package.glob(pattern)}
    assert shipped >= set(tuning.FOLDER.glob("*.json")) != set()
