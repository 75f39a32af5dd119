"""Placeholders of images in a prompt, and the rotary positions that images give to its tokens.

Source: qwen4_exp 11 ("MRoPE ids").
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from hybridjax.errors import RequestError
from hybridjax.images.grid import Grid, token_count


def expand_placeholders(
    ids: Sequence[int] | np.ndarray, grids: Sequence[Grid], image_token_id: int, merge_size: int
) -> np.ndarray:
    """The prompt with each placeholder repeated as often as its image has rows.

    Args:
      ids: a templated prompt, one placeholder per image.
      grids: of the images, in the order of their placeholders.
      image_token_id: the placeholder.
      merge_size: patches along an edge of a merge block.

    Returns:
      int32[L].

    Raises:
      RequestError: not as many placeholders as images.
    """
    ids = np.asarray(ids, np.int32)
    places = ids == image_token_id
    if (count := int(places.sum())) != len(grids):
        raise _mismatch(f"the prompt has {count} image placeholders for {len(grids)} images")
    repeats = np.ones(ids.shape, np.int64)
    repeats[places] = [token_count(grid, merge_size) for grid in grids]
    return np.repeat(ids, repeats)


def rope_positions(
    input_ids: Sequence[int] | np.ndarray, image_grids: Sequence[Grid], image_token_id: int, merge_size: int
) -> tuple[np.ndarray, int]:
    """Temporal, vertical and horizontal rotary positions of a prompt, and how decoding goes on.

    A text token advances all three by one. An image of t x h x w merged patches starting at position p
    has p + frame, p + row, p + column, and the text after it goes on at p + max(h, w).

    Args:
      input_ids: the prompt, placeholders expanded.
      image_grids: (frames, rows, columns) in patches of the images, in order.
      image_token_id: the placeholder.
      merge_size: patches along an edge of a merge block.

    Returns:
      int32[L, 3], and the delta: the token at index i >= L has the position i + delta on all axes.

    Raises:
      RequestError: placeholders and images do not match, in number or in length.
    """
    ids = np.asarray(input_ids, np.int32)
    places = np.flatnonzero(ids == image_token_id)
    wanted = sum(token_count(grid, merge_size) for grid in image_grids)
    if len(places) != wanted:
        raise _mismatch(
            f"the prompt has {len(places)} image placeholders; its {len(image_grids)} images take {wanted}"
        )
    out = np.empty((len(ids), 3), np.int32)
    at = position = used = 0
    for number, grid in enumerate(image_grids):
        start, count = int(places[used]), token_count(grid, merge_size)
        run = places[used : used + count]
        if run[-1] - start != count - 1:
            length = int(np.argmax(np.diff(run) != 1)) + 1
            raise _mismatch(f"image {number} takes {count} placeholders; the prompt has {length} in a row")
        position = _text(out, at, start, position)
        frames, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
        out[start : start + count] = np.indices((frames, rows, columns)).reshape(3, -1).T + position
        at, used, position = start + count, used + count, position + max(rows, columns)
    _text(out, at, len(ids), position)
    return out, int(out.max(initial=-1)) + 1 - len(ids)


def _text(out: np.ndarray, start: int, end: int, position: int) -> int:
    out[start:end] = np.arange(position, position + end - start, dtype=np.int32)[:, None]
    return position + end - start


def cache_ids(digest: bytes, count: int) -> np.ndarray:
    """int64[count], all negative: what stands for an image's placeholders where prompts are compared.

    Token ids alone do not tell images apart. Each number alone has 63 bits that depend on the whole digest,
    as a page of the cache may hold only one of them.

    Args:
      digest: of the image (see content_hash).
      count: placeholders of the image.
    """
    words = np.frombuffer(hashlib.shake_256(digest).digest(8 * count), np.uint64)
    return ~(words >> np.uint64(1)).astype(np.int64)


def _mismatch(message: str) -> RequestError:
    return RequestError(message, param="messages", code="image_placeholder_mismatch")
