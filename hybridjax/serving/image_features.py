"""Image features on the host: computed when a prompt's first image row is prefilled, dropped after it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.images.grid import patch_count, patch_layout
from hybridjax.serving.compiling import Programs, abstract
from hybridjax.serving.plan import NotLaunchedError, PrefillRow
from hybridjax.serving.request import Request

_SMALLEST = 256  # patches


class ImageFeatures:
    """Runs the vision tower and fills the image inputs of prefill steps. Used by one thread.

    Args:
      graph, parameters: of the model, a Qwen4ExpMultimodal.
      config: its configuration.
      dtype: of the features.
      programs: where the programs are kept.
    """

    def __init__(self, graph: Any, parameters: Any, config: Any, dtype: Any, programs: Programs):
        self._programs = programs
        self._parameters, self._vision = parameters, config.vision_config
        self._shape, self._dtype = (config.hidden_size,), jnp.dtype(dtype)
        self._zeros: dict[int, jax.Array] = {}

        def encode(parameters: Any, patches, positions, taps, weights, frame) -> jax.Array:
            model = nnx.merge(graph, parameters)
            return model.visual(patches, positions, (taps, weights), frame)

        self._encode = jax.jit(encode)

    def shape(self, rows: int) -> jax.ShapeDtypeStruct:
        """Of the features of a prefill step."""
        return jax.ShapeDtypeStruct((rows, *self._shape), self._dtype)

    def fill(self, fields: dict[str, np.ndarray], chunks: Sequence[tuple[PrefillRow, int]]) -> jax.Array:
        """Sets ``rope_positions`` and ``feature_index``; returns the features of the step's rows.

        Args:
          fields: of a prefill bucket, ``positions`` filled in.
          chunks: each with its first row.

        Raises:
          NotLaunchedError: an image cannot be computed; names its request. Others keep their features.
        """
        for chunk, _ in chunks:
            images = chunk.request.images
            if images is not None and (images.feature_index[chunk.start : chunk.end] >= 0).any():
                self._compute(chunk.request)
        fields["rope_positions"][:] = fields["positions"][:, None]
        fields["feature_index"][:] = -1
        rows = len(fields["positions"])
        features = None
        for chunk, begin in chunks:
            images = chunk.request.images
            if images is None:
                continue
            part, target = slice(chunk.start, chunk.end), slice(begin, begin + chunk.end - chunk.start)
            fields["rope_positions"][target] = images.rope_positions[part]
            index = images.feature_index[part]
            placeholder = np.flatnonzero(index >= 0)
            if len(placeholder):
                if features is None:
                    features = np.zeros((rows, *self._shape), self._dtype)
                assert chunk.request.features is not None
                features[begin + placeholder] = chunk.request.features[index[placeholder]]
                fields["feature_index"][begin + placeholder] = begin + placeholder
            if chunk.is_last:
                chunk.request.features = None
        if features is not None:
            return jax.device_put(features)
        if rows not in self._zeros:
            self._zeros[rows] = jax.device_put(np.zeros((rows, *self._shape), self._dtype))
        return self._zeros[rows]

    def _compute(self, request: Request) -> None:
        """Sets ``request.features``, unless it is known: what the vision tower makes of all its images."""
        if request.features is not None:
            return
        assert request.images is not None
        parts = []
        for number, image in enumerate(request.images.images, 1):
            try:
                parts.append(self._image(image))
            except Exception as error:
                message = f"image {number} of request {request.request_id} could not be computed"
                raise NotLaunchedError(message, [request], is_public=True) from error
        request.features = np.concatenate(parts)

    def _image(self, image: Any) -> np.ndarray:
        count = patch_count(image.grid)
        length = _SMALLEST
        while length < count:
            length *= 2
        side, merge = self._vision.grid_side, self._vision.spatial_merge_size
        layout = patch_layout([image.grid], side=side, merge_size=merge, length=length)
        patches = np.zeros((length, self._vision.patch_values), self._dtype)
        patches[:count] = image.processor.patches(image.pixels)
        inputs = self._parameters, patches, layout.positions, layout.taps, layout.weights, layout.frame
        encode = self._programs.late(
            ("images", length), lambda: self._encode.lower(*abstract(inputs)).compile()
        )
        out = encode(*inputs)
        return np.asarray(out)[: count // self._vision.merge_unit]
