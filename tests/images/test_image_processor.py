"""Patches against the reference's image processor, and the settings that are read or refused."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpVisionConfig
from hybridjax.errors import ConfigError, RequestError
from hybridjax.images import ImageProcessor

GOLDEN = load_file(Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "images.safetensors")
RELEASED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


@pytest.mark.parametrize("case", range(5))
def test_patches_are_those_of_the_reference(case):
    small = ImageProcessor(patch_size=4, min_pixels=256, max_pixels=576)
    image = GOLDEN[f"image.{case}"]
    patches, grid = small(image)
    assert list(grid) == GOLDEN[f"grid.{case}"][0].tolist()
    assert grid == small.grid(*image.shape[:2])
    assert patches.dtype == np.float32
    np.testing.assert_allclose(patches, GOLDEN[f"patches.{case}"], rtol=0, atol=1e-6)


def test_values_and_order_by_hand():
    processor = ImageProcessor(patch_size=2, min_pixels=1, max_pixels=10**6, std=(0.5, 0.25, 1.0))
    image = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
    patches, grid = processor(image)
    assert grid == (1, 2, 4)
    # Patch 6 is the lower left one of the second block: rows 2 and 3, columns 4 and 5.
    want = (image[2:4, 4:6].transpose(2, 0, 1) / 255 - 0.5) / np.array([0.5, 0.25, 1.0])[:, None, None]
    np.testing.assert_allclose(patches[6], np.repeat(want[:, None], 2, axis=1).ravel(), atol=1e-6)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sides_are_multiples_and_the_area_stays_in_bounds(height, width):
    processor = ImageProcessor(min_pixels=64 * 64, max_pixels=512 * 512)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError, match=f"{width} x {height} pixels.*200 times") as refused:
            processor.grid(height, width)
        assert refused.value.param == "messages"
        return
    new_height, new_width = processor.resized(height, width)
    assert new_height % 32 == new_width % 32 == 0 and min(new_height, new_width) >= 32
    assert new_height * new_width >= 64 * 64
    # A side shrunk below one block is widened to it again, as in the original.
    assert new_height * new_width <= 512 * 512 or min(new_height, new_width) == 32


def test_a_released_file_says_what_the_defaults_are():
    vision = Qwen4ExpVisionConfig()
    assert ImageProcessor.from_config(vision) == ImageProcessor()
    assert ImageProcessor.from_config(vision, RELEASED) == ImageProcessor()
    bounds = {"size": {"longest_edge": 9999}, "min_pixels": 2000, "max_pixels": 5000}
    read = ImageProcessor.from_config(vision, {**bounds, "image_mean": [0, 0.1, 1]})
    assert (read.min_pixels, read.max_pixels, read.mean) == (2000, 5000, (0.0, 0.1, 1.0))


def test_a_server_may_bound_the_area_further():
    vision = Qwen4ExpVisionConfig()
    assert ImageProcessor.from_config(vision, RELEASED, max_pixels=10**6).max_pixels == 10**6
    assert ImageProcessor.from_config(vision, RELEASED, max_pixels=10**9) == ImageProcessor()
    low = ImageProcessor.from_config(vision, RELEASED, max_pixels=2048)
    assert (low.min_pixels, low.max_pixels) == (2048, 2048)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("do_resize", False, "do_resize is False; it must be True"),
        ("resample", 2, "resample is 2; it must be 3"),
        ("patch_size", 14, "patch_size is 14; it must be 16"),
        ("merge_size", 4, "merge_size is 4; it must be 2"),
        ("rescale_factor", 1.0, "rescale_factor is 1.0; it must be 1/255"),
        ("size", 224, "size is 224; it must be an object"),
        ("size", {"longest_edge": 0}, "max_pixels is 0; it must be a positive integer"),
        ("min_pixels", 10**9, "max_pixels is 16777216; .*min_pixels"),
        ("max_pixels", 1000, r"max_pixels is 1000; .*one merge block \(1024\)"),
        ("image_mean", [0.5], r"image_mean is \[0.5\]; it must be three numbers"),
        ("image_std", [0.5, 0.5, 0.0], r"image_std is \(0.5, 0.5, 0.0\); .*above 0"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(field, value, message):
    with pytest.raises(ConfigError, match=re.escape("preprocessor_config.json: ") + message):
        ImageProcessor.from_config(Qwen4ExpVisionConfig(), {**RELEASED, field: value})
