"""Which implementation runs where: a function of op, architecture and shapes."""

import jax
import jax.numpy as jnp
import pytest

from hybridjax.errors import ConfigError
from hybridjax.ops import simple_gla_decode
from hybridjax.ops.dispatch import architecture, assume
from hybridjax.pallas_kernels.catalog import KERNELS, by_name
from hybridjax.pallas_kernels.selection import ARCHITECTURES, select, table
from hybridjax.pallas_kernels.state_update import default_tuning


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.op)
def test_kernels_are_chosen_where_they_ran_and_nowhere_else(kernel):
    for where in ARCHITECTURES:
        chosen = select(kernel.op, where, *kernel.operands.values(), **kernel.options)
        assert (chosen == "mosaic_gpu") == (where in kernel.ran)
        assert where in kernel.ran or chosen in ("xla", "reference")


RECURRENT = [kernel for kernel in KERNELS if "pool" in kernel.operands]


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
    assert [default_tuning(rows, 32, 132).columns for rows in (1, 8, 9, 256)] == [32, 32, 64, 64]
