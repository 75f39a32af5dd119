"""Where patches lie: the arrays that the vision tower takes beside the pixels, from the images' grids.

A grid is (frames, rows, columns) in patches. Patches come in merge-block order: the merge_size^2 patches
that become one row of the language model are neighbours, blocks go row by row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class PatchLayout:
    """What a vision tower needs to know of P patches (hybridjax/layers/vision.py).

    Attributes:
      positions: int32[P, 2], row and column of each patch.
      taps: int32[P, 4], entries of the learned position grid.
      weights: float32[P, 4], their shares.
      frame: int32[P], which frame a patch belongs to, counted over all images; -1: padding.
    """

    positions: np.ndarray
    taps: np.ndarray
    weights: np.ndarray
    frame: np.ndarray


def patch_count(grid: Grid) -> int:
    """Patches of an image."""
    return grid[0] * grid[1] * grid[2]


def token_count(grid: Grid, merge_size: int) -> int:
    """Rows of the language model that an image takes."""
    return patch_count(grid) // merge_size**2


def patch_positions(grid: Grid, merge_size: int) -> np.ndarray:
    """int32[P, 2]: row and column of each patch of an image, the same in every frame."""
    frames, rows, columns = grid
    blocks = (rows // merge_size, merge_size, columns // merge_size, merge_size)
    at = [np.broadcast_to(axis, (rows, columns)).reshape(blocks).swapaxes(1, 2).ravel()
          for axis in (np.arange(rows)[:, None], np.arange(columns)[None, :])]  # fmt: skip
    return np.tile(np.stack(at, axis=-1).astype(np.int32), (frames, 1))


def position_taps(grid: Grid, side: int, merge_size: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[P, 4], float32[P, 4]: bilinear interpolation of a side x side grid, corners on corners.

    The first patch of an axis lies on the grid's first entry, the last one on its last (qwen4_exp 11).
    """
    positions = patch_positions(grid, merge_size)
    (low_y, up_y), (share_y, part_y) = _axis(positions[:, 0], grid[1], side)
    (low_x, up_x), (share_x, part_x) = _axis(positions[:, 1], grid[2], side)
    taps = [y * side + x for y in (low_y, up_y) for x in (low_x, up_x)]
    weights = [y * x for y in (share_y, part_y) for x in (share_x, part_x)]
    return np.stack(taps, axis=-1), np.stack(weights, axis=-1)


def _axis(index: np.ndarray, size: int, side: int):
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(at).astype(np.int32)
    part = at - low.astype(np.float32)
    return (low, np.minimum(low + 1, side - 1)), (np.float32(1) - part, part)


def frame_ids(grids: Sequence[Grid]) -> np.ndarray:
    """int32[P]: the number of the frame of each patch, counted over all images."""
    sizes = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def patch_layout(
    grids: Sequence[Grid], *, side: int, merge_size: int, length: int | None = None
) -> PatchLayout:
    """The ``PatchLayout`` of images one after the other, padded to ``length`` patches.

    Args:
      grids: of the images, rows and columns multiples of merge_size.
      side: of the learned position grid.
      merge_size: patches along an edge of a merge block.
      length: P; by default the number of patches.

    Raises:
      ValueError: a grid that does not divide into merge blocks, or more patches than ``length``.
    """
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
            raise ValueError(
                f"grid {grid} does not divide into blocks of {merge_size} x {merge_size} patches"
            )
    count = sum(map(patch_count, grids))
    length = count if length is None else length
    if count > length:
        raise ValueError(f"{count} patches do not fit into {length}")

    def padded(parts: list[np.ndarray], width: int, dtype: type, fill: int = 0) -> np.ndarray:
        out = np.full((length, width), fill, dtype)
        if parts:
            out[:count] = np.concatenate(parts)
        return out

    interpolated = [position_taps(grid, side, merge_size) for grid in grids]
    return PatchLayout(
        positions=padded([patch_positions(grid, merge_size) for grid in grids], 2, np.int32),
        taps=padded([taps for taps, _ in interpolated], 4, np.int32),
        weights=padded([weights for _, weights in interpolated], 4, np.float32),
        frame=padded([frame_ids(grids)[:, None]], 1, np.int32, -1)[:, 0],
    )
