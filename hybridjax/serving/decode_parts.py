"""A decode step as several programs over ranges of layers, for n-gram tables in host memory.

The host can look n-grams up only when it has read the last tokens. So the first part holds the layers that
need no n-gram rows and runs while the host looks them up; the second holds the rest. Each is called with its
own parameters and caches only, as launching takes the host longer the more arrays there are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.serving.programs import Bucket, DeviceState, Extras, StepOutput, decode_batch, sample_rows


@dataclasses.dataclass(frozen=True)
class Part:
    """What one program of a decode step covers.

    Attributes:
      start, stop: it runs layers start .. stop - 1.
      first, last: it begins with the embedding; it ends with sampling.
      parameters, caches: indices of what it uses, in the list of all parameters and in a ``State``.
    """

    start: int
    stop: int
    first: bool
    last: bool
    parameters: tuple[int, ...]
    caches: tuple[int, ...]


class DecodeParts:
    """Compiles and launches decode steps in parts.

    Args:
      model: a Qwen4Exp with its tables on the host.
      graph, structure: of its parameters: ``nnx.split`` and then ``jax.tree.flatten``.
      ranges: layers start .. stop - 1 of each part; None: those before the first n-gram layer, and the rest.
    """

    def __init__(
        self, model: Any, graph: Any, structure: Any, ranges: Sequence[tuple[int, int]] | None = None
    ):
        self._graph, self._structure = graph, structure
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
        first, layers = model.layers_before_ngrams, len(model.layers)
        ranges = ranges or [(0, first), (first, layers)]
        self.parts = tuple(
            Part(
                start,
                stop,
                first=i == 0,
                last=i == len(ranges) - 1,
                parameters=tuple(k for k, path in enumerate(paths) if model.uses(path, start, stop)),
                caches=model.caches_of(start, stop),
            )
            for i, (start, stop) in enumerate(ranges)
        )

    def compile(self, bucket: Bucket, parameters: Sequence[Any], state: DeviceState, rows: Any) -> tuple:
        """The programs of a bucket, from the shapes of its inputs; ``rows`` are those of the n-grams."""
        buffer = jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32)
        streams, extras, programs = None, Extras(), []
        for part in self.parts:
            run = jax.jit(self._step(part, bucket, len(state.caches)), donate_argnums=1)
            inputs = *_pick(part, parameters, state), buffer, streams, extras
            lowered = run.lower(*inputs)
            streams, extras = lowered.out_info[0], Extras(ngram_rows=rows)
            streams = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), streams)
            programs.append(lowered.compile())
        return tuple(programs)

    def launch(
        self,
        programs: Sequence[Any],
        parameters: Sequence[jax.Array],
        state: DeviceState,
        buffer: Any,
        look_up: Callable[[], tuple[jax.Array, ...]],
    ) -> tuple[StepOutput, DeviceState]:
        """Launches a step; ``look_up`` gives the n-gram rows and is called while the first part runs."""
        caches, sampler, out, extras = list(state.caches), state.sampler, None, Extras()
        buffer = jax.device_put(buffer)  # once, and before the device waits for the second part
        for part, program in zip(self.parts, programs):
            leaves, own = _pick(part, parameters, DeviceState(tuple(caches), sampler))
            out, own = program(leaves, own, buffer, out, extras)
            for i, cache in zip(part.caches, own.caches):
                caches[i] = cache
            sampler = own.sampler
            if part.first:
                extras = Extras(ngram_rows=look_up())
        assert isinstance(out, StepOutput)
        return out, DeviceState(tuple(caches), sampler)

    def _step(self, part: Part, bucket: Bucket, num_caches: int) -> Callable:
        """run(leaves, state, buffer, streams, extras) -> (streams, in the last part a StepOutput; state)."""

        def run(leaves, state, buffer, streams, extras):
            parameters = _spread(part.parameters, leaves, self._structure.num_leaves)
            model = nnx.merge(self._graph, jax.tree.unflatten(self._structure, parameters))
            x = bucket.layout.unpack(buffer)
            active = x["positions"] >= 0
            batch = dataclasses.replace(decode_batch(x, state, active, 0), ngram_rows=extras.ngram_rows)
            if part.first:
                streams = model.embed(batch)
            caches = tuple(_spread(part.caches, state.caches, num_caches))
            out, caches = model.run_layers(streams, batch, caches, start=part.start, stop=part.stop)
            sampler = state.sampler
            if part.last:
                out, sampler, _ = sample_rows(model.logits(out), bucket, x, sampler, batch, active)
                out = jax.tree.map(lambda a: a[None], out)
            return out, DeviceState(tuple(caches[i] for i in part.caches), sampler)

        return run


def _pick(part: Part, parameters: Sequence[Any], state: DeviceState) -> tuple[list[Any], DeviceState]:
    caches = tuple(state.caches[i] for i in part.caches)
    return [parameters[i] for i in part.parameters], DeviceState(caches, state.sampler)


def _spread(places: Sequence[int], values: Sequence[Any], count: int) -> list[Any]:
    """A list with each value at its place and None elsewhere."""
    out: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        out[place] = value
    return out
