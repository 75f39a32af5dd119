"""The images of a prompt, as a request carries them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from hybridjax.images import Grid, ImageProcessor, cache_ids, token_count


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image in the size that the vision tower takes.

    Attributes:
      pixels: uint8[height, width, 3], resized.
      processor: makes patches of them.
      grid: frames, rows and columns of patches.
      digest: a hash of all pixels as they came.
    """

    pixels: np.ndarray
    processor: ImageProcessor
    grid: Grid
    digest: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt whose placeholders have been expanded, L tokens in all.

    Attributes:
      images: in the order of their placeholders.
      feature_index: int32[L] which feature, counted over all images, a token stands for; -1 for text.
      rope_positions: int32[L, 3] MRoPE triples.
      rope_delta: what the rotary position of a generated token exceeds its position by.
      cache_ids: int64[L] the token ids; for placeholders negative numbers made from the image's digest,
        because ids alone do not tell images apart.
    """

    images: tuple[ProcessedImage, ...]
    feature_index: np.ndarray
    rope_positions: np.ndarray
    rope_delta: int
    cache_ids: np.ndarray


class SharedImages(tuple[np.ndarray, ...]):
    """Decoded images that several requests with one prompt bring, whose pixels nobody changes any more.

    Attributes:
      prepared: the last prompt's ids and what was made of them, so that further requests make it no more.
    """

    prepared: tuple[bytes, np.ndarray, PromptImages] | None = None


def prompt_cache_ids(
    ids: np.ndarray, feature_index: np.ndarray, images: Sequence[ProcessedImage], merge_size: int
) -> np.ndarray:
    """``PromptImages.cache_ids`` from token ids and the feature that each placeholder stands for."""
    numbers = [cache_ids(i.digest, token_count(i.grid, merge_size)) for i in images]
    out = ids.astype(np.int64)
    placeholder = feature_index >= 0
    out[placeholder] = np.concatenate(numbers)[feature_index[placeholder]]
    return out
