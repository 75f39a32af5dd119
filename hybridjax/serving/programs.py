"""The device programs: prefill and decode with sampling inside, over one donated state.

Each program has the signature ``(parameters, DeviceState, int32 buffer) -> (StepOutput, DeviceState)``;
the state is donated and comes back. One program exists per bucket of static shapes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import TILE, Batch, Mode, State
from hybridjax.ops.sampling import (
    MAX_DEVICE_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    SampledLogprobs,
    SamplerState,
    SamplingRows,
    record_tokens,
    sample,
)
from hybridjax.serving.packing import Field, Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """All that requests have accumulated on the device: caches and sampling state."""

    caches: State
    sampler: SamplerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a launch sampled (K steps, B rows); see plan.StepResult.

    Fields:
      tokens: int32[K, B], -1 where the row was inactive; logprobs: float32[K, B].
      top_ids, top_logprobs: [K, B, MAX_TOP_LOGPROBS].
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Static shapes of a program.

    Attributes:
      mode: "prefill" or "decode".
      rows: 64-row tiles of a prefill (and as many sequences), or rows of a decode.
      pages: page-table columns.
      steps: most decode steps per dispatch (1 for a prefill).
    """

    mode: str
    rows: int
    pages: int
    steps: int = 1

    @functools.cached_property
    def layout(self) -> Layout:
        """The packed inputs of a step."""
        rows = self.rows
        if self.mode == "prefill":
            own = (
                Field("tokens", (rows * TILE,)),
                Field("positions", (rows * TILE,)),
                Field("tile_sequence", (rows,)),
                Field("logit_rows", (rows,)),
                Field("emits", (rows,), "bool"),
                Field("context_length", (rows,)),
                Field("initial_slot", (rows,)),
                Field("snapshot_slot", (rows,)),
            )
        else:
            own = (Field("positions", (rows,)), Field("steps", (rows,)), Field("num_steps", ()))
        return Layout((*own, *_shared_fields(rows, self.pages)))


def _shared_fields(rows: int, pages: int) -> tuple[Field, ...]:
    sampling = {
        "top_k": "int32",
        "seed": "uint32",
        "use_bias": "bool",
        "want_top": "bool",
    }
    return (
        Field("slot", (rows,)),
        Field("page_table", (rows, pages)),
        Field("stop_tokens", (rows, MAX_DEVICE_STOP_TOKENS)),
        Field("min_position", (rows,)),
        *(
            Field(f.name, (rows, 2) if f.name == "seed" else (rows,), sampling.get(f.name, "float32"))
            for f in dataclasses.fields(SamplingRows)
        ),
    )


def prefill_step(graph: Any, bucket: Bucket, parameters: Any, state: DeviceState, buffer: jax.Array):
    """Computes chunks of prompts; samples the first token of every prompt that ends here."""
    model = nnx.merge(graph, parameters)
    x = bucket.layout.unpack(buffer)
    batch = Batch(
        tokens=x["tokens"],
        positions=x["positions"],
        tile_sequence=x["tile_sequence"],
        context_length=x["context_length"],
        slot=x["slot"],
        page_table=x["page_table"],
        logit_rows=x["logit_rows"],
        initial_slot=x["initial_slot"],
        snapshot_slot=x["snapshot_slot"],
        mode=Mode.PREFILL,
    )
    hidden, caches = model.forward(batch, state.caches)
    logits = model.logits(hidden[batch.logit_rows])
    tokens, logprobs = sample(
        logits,
        _sampling_rows(x),
        state.sampler,
        batch.slot,
        batch.context_length,
        x["stop_tokens"],
        x["min_position"],
    )
    sampler = record_tokens(state.sampler, batch.slot, tokens, x["emits"])
    out = _output(jnp.where(x["emits"], tokens, -1), logprobs)
    return jax.tree.map(lambda a: a[None], out), DeviceState(caches, sampler)


def decode_step(graph: Any, bucket: Bucket, parameters: Any, state: DeviceState, buffer: jax.Array):
    """Up to ``bucket.steps`` decode steps; a row leaves at its own step limit or at a stop token."""
    model = nnx.merge(graph, parameters)
    x = bucket.layout.unpack(buffer)
    rows, settings = bucket.rows, _sampling_rows(x)

    def step(i, carry):
        state, alive, out = carry
        active = alive & (i < x["steps"])
        position = jnp.where(active, x["positions"] + i, -1)
        slot = jnp.where(active, x["slot"], 0)
        batch = Batch(
            tokens=state.sampler.last_token[slot],
            positions=position,
            tile_sequence=jnp.zeros((0,), jnp.int32),
            context_length=position + 1,
            slot=slot,
            page_table=x["page_table"],
            logit_rows=jnp.arange(rows, dtype=jnp.int32),
            mode=Mode.DECODE,
        )
        hidden, caches = model.forward(batch, state.caches)
        tokens, logprobs = sample(
            model.logits(hidden),
            settings,
            state.sampler,
            slot,
            position + 1,
            x["stop_tokens"],
            x["min_position"],
        )
        sampler = record_tokens(state.sampler, slot, tokens, active)
        new = _output(jnp.where(active, tokens, -1), logprobs)
        out = jax.tree.map(lambda all_steps, one: all_steps.at[i].set(one), out, new)
        stopped = jnp.any(tokens[:, None] == x["stop_tokens"], axis=1)
        return DeviceState(caches, sampler), active & ~stopped, out

    none = StepOutput(
        tokens=jnp.full((bucket.steps, rows), -1, jnp.int32),
        logprobs=jnp.zeros((bucket.steps, rows), jnp.float32),
        top_ids=jnp.full((bucket.steps, rows, MAX_TOP_LOGPROBS), -1, jnp.int32),
        top_logprobs=jnp.zeros((bucket.steps, rows, MAX_TOP_LOGPROBS), jnp.float32),
    )
    start = (state, x["positions"] >= 0, none)
    state, _, out = jax.lax.fori_loop(0, x["num_steps"], step, start)
    return out, state


STEPS = {"prefill": prefill_step, "decode": decode_step}


def _sampling_rows(x) -> SamplingRows:
    return SamplingRows(**{f.name: x[f.name] for f in dataclasses.fields(SamplingRows)})


def _output(tokens: jax.Array, logprobs: SampledLogprobs) -> StepOutput:
    return StepOutput(tokens, logprobs.sampled, logprobs.top_ids, logprobs.top_logprobs)
