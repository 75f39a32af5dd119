"""Choosing implementations: explicit names are obeyed or refused, never replaced silently."""

import jax
import jax.numpy as jnp
import pytest

from hybridjax.errors import ConfigError
from hybridjax.ops import OPS, Op, override
from hybridjax.ops.dispatch import einsum_f32


@pytest.fixture
def op():
    made = Op("test_double", lambda x, small=True: ("reference", 2 * x))
    made.register("gpu_only", lambda x, small=True: ("gpu_only", 2 * x), platforms=("gpu",))
    made.register("fast", lambda x, small=True: ("fast", 2 * x), supports=lambda x, small=True: small)
    yield made
    del OPS["test_double"]


def test_the_first_fitting_implementation_is_taken(op):
    assert op(1) == ("fast", 2)
    assert op(1, small=False) == ("reference", 2)
    assert op.names == ("gpu_only", "fast", "reference")


def test_an_implementation_registered_first_is_preferred(op):
    op.register("better", lambda x, small=True: ("better", 2 * x), first=True)
    assert op(1) == ("better", 2)


def test_a_name_is_obeyed_or_refused(op):
    assert op(1, implementation="reference") == ("reference", 2)
    assert op(1, implementation="fast") == ("fast", 2)
    with pytest.raises(NotImplementedError, match="'fast' does not support these arguments"):
        op(1, small=False, implementation="fast")
    with pytest.raises(NotImplementedError, match=r"runs on \('gpu',\), not on 'cpu'"):
        op(1, implementation="gpu_only")
    with pytest.raises(ConfigError, match="no implementation 'slow'; it has"):
        op(1, implementation="slow")


def test_an_implementation_can_be_named_by_module_and_is_imported_when_chosen(op):
    op.register("lazy", "no_such_module_of_hybridjax:function", first=True, platforms=("gpu",))
    assert op(1) == ("fast", 2)
    op.register("here", "operator:neg", first=True)
    assert op(3) == -3


def test_two_implementations_cannot_share_a_name(op):
    with pytest.raises(ConfigError, match="registered twice"):
        op.register("fast", abs)
    with pytest.raises(ConfigError, match="registered twice"):
        op.register("reference", abs)


def test_an_override_holds_inside_its_block_only(op):
    with override("test_double=reference, rms_norm=reference"):
        assert op(1) == ("reference", 2)
        assert op(1, implementation="fast") == ("fast", 2)
    assert op(1) == ("fast", 2)
    with override(None):
        assert op(1) == ("fast", 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing=reference", "implementation names op 'nothing'; known ops"),
        ("test_double=slow", "no implementation 'slow'"),
        ("test_double", "no implementation ''"),
    ],
)
def test_a_wrong_override_is_refused(op, spec, message):
    with pytest.raises(ConfigError, match=message), override(spec):
        pass


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_einsum_accumulates_in_float32_whatever_the_operands(dtype):
    x = jnp.full((1, 1000), 1.001, dtype)
    out = jax.jit(lambda x: einsum_f32("ai,bi->ab", x, x))(x)
    exact = 1000 * float(x[0, 0]) ** 2
    assert out.dtype == jnp.float32
    assert float(out[0, 0]) == pytest.approx(exact, rel=1e-6)
