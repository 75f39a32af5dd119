"""Whether tensors tile parameters, and models taken apart into tensors and put together again."""

import itertools
from collections import Counter
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybridjax.errors import ConfigError
from hybridjax.models.base import TensorEntry, tiles
from hybridjax.training.parameters import ParameterLayout

PATH = ("p",)
ROWS = 3


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


def bent(entry: TensorEntry, items: int) -> Iterator[list[TensorEntry]]:
    """An entry, and what it could wrongly be."""
    rows, start, index = entry.shape[0], entry.start, entry.index or 0
    yield [entry]
    yield []
    yield [entry, entry]
    yield [TensorEntry("t", (rows, 3), PATH, start, index)]
    yield [TensorEntry("t", (items, ROWS, 2), PATH)]
    for step in (-1, 1):
        yield [TensorEntry("t", (rows, 2), PATH, start + step, index)]
        yield [TensorEntry("t", (rows, 2), PATH, start, index + step)]
        if rows + step:
            yield [TensorEntry("t", (rows + step, 2), PATH, start, index)]


def cut_stacks() -> Iterator[tuple[list[TensorEntry], tuple[int, ...]]]:
    """Entries that tile a stack [items, ROWS, 2] in every way, with each one of them bent in turn."""
    cuts = [[0, ROWS], [0, 1, ROWS], [0, 2, ROWS], [0, 1, 2, ROWS]]
    for items in (1, 2):
        for chosen in itertools.product(cuts, repeat=items):
            entries = [
                TensorEntry("t", (stop - start, 2), PATH, start, index)
                for index, bounds in enumerate(chosen)
                for start, stop in itertools.pairwise(bounds)
            ]
            for i, entry in enumerate(entries):
                for instead in bent(entry, items):
                    yield entries[:i] + instead + entries[i + 1 :], (items, ROWS, 2)


def test_tiling_is_counting():
    verdicts = Counter()
    for entries, shape in cut_stacks():
        if entries:
            tiled = tiles(sorted(entries, key=lambda entry: entry.order), shape)
            assert tiled == covers(entries, shape), entries
            verdicts[tiled] += 1
    assert verdicts[True] > 50 and verdicts[False] > 500


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
