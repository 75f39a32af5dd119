"""What a request carries of its images: made once where several requests share a prompt."""

import json
from pathlib import Path

import numpy as np
import pytest

from hybridjax.configs import EngineConfig, Qwen4ExpMultimodalConfig
from hybridjax.images import ImageProcessor
from hybridjax.serving.image_inputs import ImageInputs
from hybridjax.serving.prompt_images import SharedImages
from hybridjax.serving.request import Limits

GOLDEN = Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "multimodal"
IMAGE = 290
PICTURE = np.random.default_rng(0).integers(0, 256, (24, 40, 3)).astype(np.uint8)


@pytest.fixture
def inputs(monkeypatch):
    config = Qwen4ExpMultimodalConfig.from_dict(json.loads((GOLDEN / "config.json").read_text()))
    made = ImageInputs.load(GOLDEN, config, EngineConfig(model_path="x", max_image_area=16 * 16 * 8))
    resize, calls = ImageProcessor.resize, []
    monkeypatch.setattr(ImageProcessor, "resize", lambda *args: calls.append(1) or resize(*args))
    return made, calls


LIMITS = Limits(context_length=512, vocab_size=300)


def test_shared_images_are_prepared_once_for_a_prompt(inputs):
    inputs, calls = inputs
    images = SharedImages([PICTURE])
    first = inputs.prepare([1, IMAGE, 2], images, LIMITS)
    for ids in ([1, IMAGE, 2], np.array([1, IMAGE, 2], np.int32)):
        again = inputs.prepare(ids, images, LIMITS)
        assert again[0] is first[0] and again[1] is first[1]
    assert len(calls) == 1


def test_another_prompt_or_a_plain_list_is_prepared_anew(inputs):
    inputs, calls = inputs
    images = SharedImages([PICTURE])
    ids, made = inputs.prepare([1, IMAGE, 2], images, LIMITS)
    others, other = inputs.prepare([1, 3, IMAGE, 2], images, LIMITS)
    assert len(others) == len(ids) + 1 and len(calls) == 2
    np.testing.assert_array_equal(other.cache_ids[2:], made.cache_ids[1:])
    plain = [PICTURE.copy()]
    before = inputs.prepare([1, IMAGE, 2], plain, LIMITS)[1]
    plain[0][:] = 255 - plain[0]
    after = inputs.prepare([1, IMAGE, 2], plain, LIMITS)[1]
    assert len(calls) == 4 and before.images[0].digest != after.images[0].digest
