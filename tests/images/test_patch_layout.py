"""Where patches lie, against plain loops in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridjax.images import patch_layout

GRIDS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)).map(
        lambda g: (g[0], 2 * g[1], 2 * g[2])
    ),
    max_size=4,
)


def in_order(grids, merge):
    """(image and frame, row, column, rows, columns) of each patch, one by one."""
    number = 0
    for frames, rows, columns in grids:
        for _ in range(frames):
            for y in range(0, rows, merge):
                for x in range(0, columns, merge):
                    for dy in range(merge):
                        for dx in range(merge):
                            yield number, y + dy, x + dx, rows, columns
            number += 1


@given(GRIDS, st.integers(1, 9), st.integers(0, 7))
def test_layout_is_that_of_plain_loops(grids, side, spare):
    patches = list(in_order(grids, 2))
    layout = patch_layout(grids, side=side, merge_size=2, length=len(patches) + spare)
    assert layout.frame.dtype == layout.positions.dtype == layout.taps.dtype == np.int32
    assert layout.weights.dtype == np.float32
    for i, (frame, row, column, rows, columns) in enumerate(patches):
        assert layout.frame[i] == frame
        assert layout.positions[i].tolist() == [row, column]
        grid = np.zeros((side, side))
        np.add.at(grid.ravel(), layout.taps[i], layout.weights[i])
        y = np.linspace(0, side - 1, rows)[row]
        x = np.linspace(0, side - 1, columns)[column]
        want = np.outer(
            np.maximum(1 - abs(np.arange(side) - y), 0), np.maximum(1 - abs(np.arange(side) - x), 0)
        )
        np.testing.assert_allclose(grid, want, atol=3e-6)
    end = len(patches)
    assert (layout.frame[end:] == -1).all()
    assert not layout.weights[end:].any() and not layout.taps[end:].any()


@pytest.mark.parametrize(
    "grid, length, message", [((1, 3, 4), None, "blocks of 2 x 2"), ((1, 4, 4), 15, "16 patches do not fit")]
)
def test_what_does_not_fit_is_refused(grid, length, message):
    with pytest.raises(ValueError, match=message):
        patch_layout([grid], side=4, merge_size=2, length=length)
