"""From decoded images to what a request carries: patches, placeholders, rotary positions, cache keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridjax.configs import EngineConfig
from hybridjax.errors import RequestError
from hybridjax.images import ImageProcessor, content_hash, expand_placeholders, rope_positions
from hybridjax.json_files import read_object
from hybridjax.serving.api import ImageSupport
from hybridjax.serving.prompt_images import ProcessedImage, PromptImages, SharedImages, prompt_cache_ids
from hybridjax.serving.request import Limits


class ImageInputs:
    """Prepares the images of prompts; callable from any thread.

    Args:
      processor: of the model.
      config: the model's configuration, with ``vision_config`` and ``image_token_id``.
      support: the limits that a front checks before it decodes anything.
    """

    def __init__(self, processor: ImageProcessor, config: Any, support: ImageSupport):
        self._processor, self._config, self.support = processor, config, support
        self._merge = config.vision_config.spatial_merge_size

    @classmethod
    def load(cls, directory: Path, architecture: Any, config: EngineConfig) -> "ImageInputs":
        """Reads preprocessor_config.json if the checkpoint has one."""
        file = directory / "preprocessor_config.json"
        raw = read_object(file) if file.exists() else None
        processor = ImageProcessor.from_config(
            architecture.vision_config, raw, max_pixels=config.max_image_area
        )
        support = ImageSupport(
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            max_images=config.max_images_per_request,
        )
        return cls(processor, architecture, support)

    def prepare(
        self, ids: Any, images: Sequence[np.ndarray], limits: Limits
    ) -> tuple[Any, PromptImages | None]:
        """The prompt with placeholders expanded and its images processed.

        Args:
          ids: token ids with one placeholder per image, not checked yet.
          images: uint8[H, W, 3] RGB in the order of their placeholders; ``SharedImages`` are prepared once.
          limits: of the engine.

        Raises:
          RequestError: too many images, not as many as placeholders, or more than the context holds.
        """
        config = self._config
        flat = np.asarray(ids) if not isinstance(ids, np.ndarray) else ids
        if flat.ndim != 1 or flat.dtype.kind not in "iu":
            return ids, None  # make_request says what is wrong with it
        if (flat == config.video_token_id).any():
            raise RequestError("the prompt has a video placeholder; videos are not supported",
                               param="prompt", code="unsupported_content")  # fmt: skip
        if not len(images):
            count = int((flat == config.image_token_id).sum())
            if not count:
                return ids, None
            raise RequestError(
                f"the prompt has {count} image placeholders and no images, which only chat messages bring",
                param="prompt",
                code="image_placeholder_mismatch",
            )
        if len(images) > self.support.max_images:
            raise RequestError(
                f"the prompt has {len(images)} images; at most {self.support.max_images} are allowed",
                param="messages",
                code="too_many_images",
            )
        shared = images if isinstance(images, SharedImages) else None
        known = flat.astype(np.int64).tobytes()
        if shared is not None and shared.prepared is not None and shared.prepared[0] == known:
            return shared.prepared[1:]
        grids = [self._processor.grid(*image.shape[:2]) for image in images]
        expanded = expand_placeholders(flat, grids, config.image_token_id, self._merge)
        if len(expanded) >= limits.context_length:
            raise RequestError(
                f"the prompt has {len(expanded)} tokens with its images; the context of "
                f"{limits.context_length} tokens must also hold at least one generated token",
                param="messages",
                code="context_length_exceeded",
            )
        rope, delta = rope_positions(expanded, grids, config.image_token_id, self._merge)
        processed = tuple(
            ProcessedImage(self._processor.resize(image), self._processor, grid, content_hash(image))
            for image, grid in zip(images, grids)
        )
        placeholder = expanded == config.image_token_id
        index = np.where(placeholder, np.cumsum(placeholder) - 1, -1).astype(np.int32)
        keys = prompt_cache_ids(expanded, index, processed, self._merge)
        prepared = PromptImages(processed, index, rope, delta, keys)
        if shared is not None:
            shared.prepared = known, expanded, prepared
        return expanded, prepared
