"""Whether tensors tile parameters, and models taken apart into tensors and put together again."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from hybridjax.errors import ConfigError
from hybridjax.models.base import TensorEntry, tiles
from hybridjax.training.parameters import ParameterLayout

PATH = ("p",)


def covers(entries: list[TensorEntry], shape: tuple[int, ...]) -> bool:
    """By counting how often each element is filled."""
    count = np.zeros(shape, np.int64)
    for entry in entries:
        if entry.index is not None and not 0 <= entry.index < shape[0]:
            return False
        part = count if entry.index is None else count[entry.index]
        if len(entry.shape) != part.ndim or entry.shape[1:] != part.shape[1:]:
            return False
        if entry.start < 0 or entry.start + entry.shape[0] > part.shape[0]:
            return False
        part[entry.start : entry.start + entry.shape[0]] += 1
    return bool((count == 1).all())


@st.composite
def cut(draw):
    """Entries that tile a stack [items, rows, 2], most of the time with one of them bent."""
    items, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    entries = []
    for index in range(items):
        inner = sorted(draw(st.sets(st.integers(1, max(rows - 1, 1)))) - {rows})
        bounds = [0, *inner, rows]
        entries += [
            TensorEntry("t", (stop - start, 2), PATH, start, index) for start, stop in zip(bounds, bounds[1:])
        ]
    bent = draw(st.sampled_from(["no", "drop", "double", "start", "index", "rows", "columns", "whole"]))
    i = draw(st.integers(0, len(entries) - 1))
    e = entries[i]
    step = draw(st.sampled_from([-1, 1]))
    changes = {
        "no": [e],
        "drop": [],
        "double": [e, e],
        "start": [TensorEntry("t", e.shape, PATH, e.start + step, e.index)],
        "index": [TensorEntry("t", e.shape, PATH, e.start, e.index + step)],
        "rows": [TensorEntry("t", (e.shape[0] + step, 2), PATH, e.start, e.index)],
        "columns": [TensorEntry("t", (e.shape[0], 3), PATH, e.start, e.index)],
        "whole": [TensorEntry("t", (items, rows, 2), PATH)],
    }
    entries[i : i + 1] = changes[bent]
    return entries, (items, rows, 2)


@given(cut())
def test_tiling_is_counting(drawn):
    entries, shape = drawn
    entries = [e for e in entries if e.shape[0] > 0]
    if entries:
        assert tiles(sorted(entries, key=lambda e: e.order), shape) == covers(entries, shape)


def test_parts_are_views_of_items_and_rows():
    value = np.arange(24).reshape(2, 4, 3)
    assert np.array_equal(TensorEntry("t", (2, 3), PATH, 1, 1).part_of(value), value[1, 1:3])
    assert np.array_equal(TensorEntry("t", (4, 3), PATH, 0, 1).part_of(value), value[1])
    whole = TensorEntry("t", (2, 4, 3), PATH).part_of(value)
    assert whole is value
    TensorEntry("t", (1, 3), PATH, 3, 0).part_of(value)[:] = 0
    assert not value[0, 3].any() and value[1, 3].any()


class Stack(nnx.Module):
    """A stack of fused matrices, and entries that name every part of it."""

    config = None

    def __init__(self):
        self.stack = nnx.Param(jnp.arange(2 * 5 * 3, dtype=jnp.float32).reshape(2, 5, 3))
        self.whole = nnx.Param(jnp.ones((2, 2, 2)))

    def checkpoint_entries(self, config):
        parts = [("up", 2, 3), ("gate", 0, 2), ("down", 3, 5)]
        for e in (1, 0):
            for name, start, stop in parts:
                yield TensorEntry(f"{e}.{name}", (stop - start, 3), ("stack",), start, e)
        yield TensorEntry("whole", (2, 2, 2), ("whole",))


def test_training_takes_stacks_apart_and_puts_them_together():
    model = Stack()
    layout = ParameterLayout.of(model)
    tensors = layout.tensors(model)
    assert {name: t.shape for name, t in tensors.items()}["1.down"] == (2, 3)
    assert np.array_equal(tensors["1.gate"], model.stack[1, :2])
    tensors["0.up"] = tensors["0.up"] + 100
    again = layout.model(tensors, jnp.float32)
    assert np.array_equal(again.stack[...], model.stack[...].at[0, 2].add(100))
    assert np.array_equal(again.whole[...], model.whole[...])


def test_training_refuses_a_stack_with_a_gap():
    class Gap(Stack):
        def checkpoint_entries(self, config):
            return [entry for entry in super().checkpoint_entries(config) if entry.name != "1.up"]

    with pytest.raises(ConfigError, match="do not tile parameter .*stack"):
        ParameterLayout.of(Gap())
