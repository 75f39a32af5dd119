"""The benchmarks of what is around the recurrences, and of whole mixers, as far as a CPU takes them."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import layers, pointwise
from hybridjax.ops.dispatch import assume, parse_override
from hybridjax.pallas_kernels.catalog import KERNELS


@pytest.mark.parametrize("name", pointwise.CASES)
def test_definitions_agree_with_the_formulas_and_others_do_not(name):
    function = pointwise.implementations(name)["reference"]
    assert pointwise.error(name, function, 5) < 0.01

    def wrong(*args, **options):
        first, *rest = jax.tree.leaves(function(*args, **options))
        return first.at[(0,) * first.ndim].add(jnp.abs(first).max()), *rest

    assert pointwise.error(name, wrong, 5) > 0.3


def test_kernels_are_timed_at_the_sizes_that_they_take():
    kernel = pointwise.implementations("lightning_rows")["mosaic_gpu"]
    with assume("sm_90"):
        assert pointwise.supported(kernel, "lightning_rows", (1, 64, 100, 128)) == [64, 128]


def test_a_mixer_is_timed_and_compared_with_the_definitions(monkeypatch, capsys):
    options = "--kinds gdn --smoke --rows 2 --chunks 64 --copies 2 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["layers", *options.split()])
    assert layers.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["mode"] for row in result["rows"]] == ["decode", "prefill"]
    assert max(result["errors"].values()) < 1e-4 and np.isfinite(list(result["errors"].values())).all()
    assert all(row["times_limit"] > 0 and row["bytes"] > 0 for row in result["rows"])


def test_compared_are_all_kernels_around_the_recurrences():
    other = parse_override(layers.FUSIONS)
    around = {kernel.op for kernel in KERNELS if ".pointwise." in kernel.target}
    assert set(other) == around and "mosaic_gpu" not in other.values()
