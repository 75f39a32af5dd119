"""A model in a directory, run layer by layer: one layer's parameters are in device memory at a time."""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.batch import Batch
from hybridjax.calibration.text import TokenBatch
from hybridjax.checkpoints.loading import open_directory, read_parameter
from hybridjax.checkpoints.parameters import Parameter
from hybridjax.models.base import Path as ParameterPath

_READERS = 4
# Parameters that belong neither before nor behind the layers.
_ELSEWHERE = ("layers", "mtp", "visual")


class Layer:
    """One decoder layer on the device.

    Attributes:
      graph: its static structure, equal for layers of one kind.
      state: its parameters.
    """

    def __init__(self, module: nnx.Module):
        self.graph, self.state = nnx.split(module)

    def __call__(self, hidden: np.ndarray, batch: Batch, ngram_rows: np.ndarray | None) -> np.ndarray:
        """Hidden states [N, D] after the layer, in host memory."""
        return np.asarray(_run(self.graph, self.state, hidden, batch, ngram_rows))

    def parameters(self) -> dict[ParameterPath, jax.Array]:
        """Its parameters by path."""
        flat: Any = nnx.to_flat_state(self.state)
        return {path: variable.get_value() for path, variable in flat}

    def update(self, values: Mapping[ParameterPath, jax.Array]) -> None:
        """Replaces parameters."""
        flat = dict(nnx.to_flat_state(self.state))
        for path, value in values.items():
            flat[path] = flat[path].replace(value)
        self.state = nnx.from_flat_state(flat.items())


@functools.partial(jax.jit, static_argnums=0)
def _run(graph: Any, state: Any, hidden: jax.Array, batch: Batch, ngram_rows: jax.Array | None) -> jax.Array:
    return nnx.merge(graph, state).whole(hidden, batch, ngram_rows)


class LayerStream:
    """The layers of a checkpoint, and what comes before and behind them.

    Args:
      directory: a model directory, quantised or not.
      dtype: of parameters and activations; None: the checkpoint's.
      activations: what NVFP4 weights do with activations, see quantization.dispatch.

    Attributes:
      model: the nnx module; its parameters have no memory.
      layout, weights: see checkpoints.loading.OpenModel.
      count: of layers.

    Raises:
      CheckpointError: as ``load_model`` does.
    """

    def __init__(self, directory: Path, dtype: Any = None, activations: str = "w4a16"):
        opened = open_directory(directory, dtype=dtype, ple_offload="mmap")
        self.model, self.layout, self.weights = opened.model, opened.layout, opened.weights
        self.count = len(self.model.layers)
        self._activations = activations
        self._pool = ThreadPoolExecutor(_READERS)
        self._ends: Any = None
        graph, nothing = nnx.split(self.model)

        def with_ends(state: Any) -> Any:
            known = dict(nnx.to_flat_state(nothing)) | dict(nnx.to_flat_state(state))
            return nnx.merge(graph, nnx.from_flat_state(known.items()))

        self._embed = jax.jit(lambda state, batch: with_ends(state).embed(batch))
        self._costs = jax.jit(lambda state, *rows: _costs(with_ends(state), *rows))

    def _read(self, parameter: Parameter) -> nnx.Variable[Any]:
        return parameter.variable.replace(jax.device_put(read_parameter(parameter, self.weights, self._pool)))

    def layer(self, index: int) -> Layer:
        """Reads a layer's parameters."""
        module = self.model.layers[index]
        for _, node in nnx.iter_graph(module):
            if hasattr(node, "activations"):
                node.activations = self._activations
        graph, _ = nnx.split(module)
        loaded = {
            parameter.path[2:]: self._read(parameter)
            for parameter in self.layout.parameters
            if parameter.path[:2] == ("layers", index)
        }
        return Layer(nnx.merge(graph, nnx.from_flat_state(loaded.items())))

    @property
    def ends(self) -> Any:
        """The parameters of what is no layer: embedding, final norm, lm_head; read when first needed."""
        if self._ends is None:
            found = {
                parameter.path: self._read(parameter)
                for parameter in self.layout.parameters
                if parameter.path[0] not in _ELSEWHERE
            }
            self._ends = nnx.from_flat_state(found.items())
        return self._ends

    def embed(self, tokens: TokenBatch) -> np.ndarray:
        """Hidden states [N, D] before the first layer, in host memory."""
        return np.asarray(self._embed(self.ends, tokens.whole()))

    def ngram_rows(self, index: int, tokens: TokenBatch) -> np.ndarray | None:
        """[N, E]: the n-gram embeddings that a layer adds; None: it has none."""
        layers = getattr(getattr(self.model, "text_config", None), "ple_layers", ())
        if index not in layers:
            return None
        number = layers.index(index)
        hashing, table = self.model.ngram_hashes[number], self.model.host_tables[number]
        rows = np.concatenate([hashing.rows_numpy(ids) for ids in tokens.ids])
        return table.gather(rows).reshape(len(rows), -1)

    def costs(
        self, hidden: np.ndarray, tokens: TokenBatch, reference: np.ndarray | None = None
    ) -> tuple[float, float]:
        """What predicting every token but each sequence's first costs, summed.

        Args:
          hidden: [N, D] the last layer's hidden states.
          tokens: the batch.
          reference: those of another model, to compare with.

        Returns:
          -ln p, and the Kullback-Leibler divergence from the reference's predictions (0 without one).
        """
        count, length = tokens.ids.shape
        targets = np.zeros_like(tokens.ids)
        targets[:, :-1] = tokens.ids[:, 1:]
        scored = np.arange(length) < tokens.lengths[:, None] - 1
        rows = hidden.reshape(count, length, -1)
        others = rows if reference is None else reference.reshape(count, length, -1)
        found = [
            self._costs(self.ends, rows[i], others[i], targets[i], scored[i])
            for i in range(count)
            if scored[i].any()
        ]
        return sum(float(nats) for nats, _ in found), sum(float(other) for _, other in found)


def _costs(
    model: Any, hidden: jax.Array, other: jax.Array, targets: jax.Array, scored: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logs, known = (jax.nn.log_softmax(model.logits(h)) for h in (hidden, other))
    chosen = jnp.take_along_axis(logs, targets[:, None], axis=1)[:, 0]
    apart = jnp.sum(jnp.exp(known) * (known - logs), axis=1)
    return -jnp.sum(jnp.where(scored, chosen, 0.0)), jnp.sum(jnp.where(scored, apart, 0.0))
