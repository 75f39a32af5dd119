"""From pixels to patches, as transformers' ``Qwen2VLImageProcessorPil`` does it (qwen4_exp 11)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpVisionConfig
from hybridjax.configs.validation import check, positive_int
from hybridjax.errors import ConfigError, RequestError
from hybridjax.images.grid import Grid

MAX_ASPECT_RATIO = 200

_FILE = "preprocessor_config.json: "
_RESCALE = 1 / 255


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Resizes, normalises and cuts images into patches; safe to share between threads.

    Attributes:
      patch_size, temporal_patch_size, merge_size: those of the vision tower.
      min_pixels, max_pixels: area of an image after resizing.
      mean, std: of the three channels, for values in 0..1.
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self):
        for name in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"):
            positive_int(_FILE + name, getattr(self, name))
        low, block = self.min_pixels, self.factor**2
        most = self.max_pixels
        check(most >= max(low, block), _FILE + "max_pixels", most,
              f"at least min_pixels ({low}) and one merge block ({block})")  # fmt: skip
        for name, values in (("image_mean", self.mean), ("image_std", self.std)):
            check(len(values) == 3 and all(map(math.isfinite, values)), _FILE + name, values, "three numbers")
        check(all(value > 0 for value in self.std), _FILE + "image_std", self.std, "three numbers above 0")

    @property
    def factor(self) -> int:
        """Pixels along an edge of a merge block: sides of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_config(
        cls,
        vision_config: Qwen4ExpVisionConfig,
        preprocessor_config: Mapping[str, Any] | None = None,
        *,
        max_pixels: int | None = None,
    ) -> "ImageProcessor":
        """Reads the content of a released ``preprocessor_config.json``.

        Args:
          vision_config: says what patches the tower takes.
          preprocessor_config: None, and fields it leaves out, mean the released model's values.
          max_pixels: a server's own bound on the area after resizing, beside that of the file.

        Raises:
          ConfigError: a field that the tower or this class cannot follow, by name.
        """
        raw = preprocessor_config or {}
        patches = {
            "patch_size": vision_config.patch_size,
            "temporal_patch_size": vision_config.temporal_patch_size,
            "merge_size": vision_config.spatial_merge_size,
        }
        allowed = {**_FIXED, **{name: (value,) for name, value in patches.items()}}
        for name, values in allowed.items():
            check(raw.get(name) is None or raw[name] in values, _FILE + name, raw.get(name), f"{values[0]!r}")
        scale = raw.get("rescale_factor", _RESCALE)
        near = type(scale) in (int, float) and math.isclose(scale, _RESCALE, rel_tol=1e-6)
        check(near, _FILE + "rescale_factor", scale, "1/255")
        size = raw.get("size") or {}
        if not isinstance(size, Mapping):
            raise ConfigError(f"{_FILE}size is {size!r}; it must be an object")
        fields: dict[str, Any] = dict(patches)
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            for given in (size.get(edge), size.get(name), raw.get(name)):
                if given is not None:
                    positive_int(_FILE + name, given)
                    fields[name] = given
        for name, field in (("image_mean", "mean"), ("image_std", "std")):
            if raw.get(name) is not None:
                fields[field] = _three(name, raw[name])
        known = cls(**fields)
        if max_pixels is not None and max_pixels < known.max_pixels:
            least = min(known.min_pixels, max_pixels)
            known = dataclasses.replace(known, min_pixels=least, max_pixels=max_pixels)
        return known

    def grid(self, height: int, width: int) -> Grid:
        """(1, rows, columns) in patches of an image of this size in pixels, without looking at it.

        Raises:
          RequestError: one side is more than 200 times the other.
        """
        height, width = self.resized(height, width)
        return 1, height // self.patch_size, width // self.patch_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing: multiples of ``factor``, the area within the bounds.

        Raises:
          RequestError: one side is more than 200 times the other.
        """
        long, short = max(height, width), min(height, width)
        if long > MAX_ASPECT_RATIO * short:
            raise RequestError(
                f"an image has {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times "
                "the other",
                param="messages",
                code="invalid_image",
            )
        factor = self.factor
        # Python's round takes halves to even numbers, here as in the original.
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, Grid]:
        """Patches of one image, and its grid: ``patches(resize(pixels))``.

        Args:
          pixels: uint8[height, width, 3].

        Raises:
          RequestError: one side is more than 200 times the other.
        """
        return self.patches(self.resize(pixels)), self.grid(*pixels.shape[:2])

    def resize(self, pixels: np.ndarray) -> np.ndarray:
        """uint8[height, width, 3] in the size that ``patches`` takes; raises as ``resized`` does."""
        height, width = self.resized(*pixels.shape[:2])
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(image)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Patches of a resized image in merge-block order, values in the order (channel, frame, row, column).

        The pixels take an eighth of their bytes, so an image that waits is better kept as these.

        Args:
          pixels: uint8[height, width, 3] of ``resize``.

        Returns:
          float32[P, 3 * temporal_patch_size * patch_size^2], a still image in every frame.
        """
        height, width = pixels.shape[:2]
        # There are 256 values: a table gives each what the original computes, float32(float64 / 255).
        levels = (np.arange(256, dtype=np.float64) * _RESCALE).astype(np.float32)[:, None]
        table = (levels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        size, merge = self.patch_size, self.merge_size
        rows, columns = height // size, width // size
        cut = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, size, size)
        frames = (rows * columns, 3, self.temporal_patch_size, size, size)
        values = np.empty(frames, np.float32)
        for channel in range(3):
            values[:, channel] = table[:, channel][cut[:, channel]]
        return values.reshape(rows * columns, -1)


_FIXED: dict[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
    "resample": (3,),
}


def _three(name: str, value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list | tuple) else ()
    if len(numbers) != 3 or not all(type(item) in (int, float) for item in numbers):
        raise ConfigError(f"{_FILE}{name} is {value!r}; it must be three numbers")
    return tuple(map(float, numbers))
