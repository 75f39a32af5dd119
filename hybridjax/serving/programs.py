"""The device programs: prefill and decode with sampling inside, over one donated state.

Each program has the signature ``(parameters, DeviceState, int32 buffer, Extras) -> (StepOutput,
DeviceState)``; the state is donated and comes back. One program exists per bucket of static shapes. Where
the host looks n-grams up, a decode step is several programs instead (decode_parts.py).
"""

import dataclasses
import functools
from collections.abc import Mapping
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
    score,
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
      prompt: of a prefill step, by row of the step: of the prompt token that follows the row's.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    prompt: SampledLogprobs | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extras:
    """Large inputs of a step, or their shapes; see the fields of the same names in batch.Batch."""

    ngram_rows: tuple[Any, ...] | None = None
    features: Any = None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Static shapes of a program.

    Attributes:
      mode: "prefill" or "decode".
      rows: 64-row tiles of a prefill (and as many sequences), or rows of a decode.
      pages: page-table columns.
      steps: most decode steps per dispatch (1 for a prefill).
      vocab_limit: ids from here on are never sampled; None: all ids may be.
      images: rows have rotary positions of their own and may stand for image features.
    """

    mode: str
    rows: int
    pages: int
    steps: int = 1
    images: bool = False
    vocab_limit: int | None = None

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
                Field("scored_tiles", ()),
                Field("targets", (rows * TILE,)),
            )
            if self.images:
                own += (Field("rope_positions", (rows * TILE, 3)), Field("feature_index", (rows * TILE,)))
        else:
            own = (Field("positions", (rows,)), Field("steps", (rows,)), Field("num_steps", ()))
            if self.images:
                own += (Field("rope_delta", (rows,)),)
        return Layout((*own, *_shared_fields(rows, self.pages, self.steps)))


def _shared_fields(rows: int, pages: int, steps: int) -> tuple[Field, ...]:
    sampling = {
        "top_k": "int32",
        "seed": "uint32",
        "use_bias": "bool",
        "use_mask": "bool",
        "want_top": "bool",
    }
    return (
        Field("slot", (rows,)),
        Field("page_table", (rows, pages)),
        Field("stop_tokens", (rows, MAX_DEVICE_STOP_TOKENS)),
        Field("min_position", (rows,)),
        Field("forced", (rows, steps)),
        *(
            Field(f.name, (rows, 2) if f.name == "seed" else (rows,), sampling.get(f.name, "float32"))
            for f in dataclasses.fields(SamplingRows)
        ),
    )


def prefill_step(
    graph: Any, bucket: Bucket, parameters: Any, state: DeviceState, buffer: jax.Array, extras: Extras
):
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
        rope_positions=x.get("rope_positions"),
        ngram_rows=extras.ngram_rows,
        features=extras.features,
        feature_index=x.get("feature_index"),
        mode=Mode.PREFILL,
    )
    hidden, caches = model.forward(batch, state.caches)
    logits = model.logits(hidden[batch.logit_rows])
    out, sampler, _ = sample_rows(logits, bucket, x, state.sampler, batch, x["emits"])
    out = jax.tree.map(lambda a: a[None], out)
    out = dataclasses.replace(out, prompt=_score_prompt(model, hidden, bucket, x))
    return out, DeviceState(caches, sampler)


def _score_prompt(model: Any, hidden: jax.Array, bucket: Bucket, x: Mapping[str, jax.Array]):
    """Log probabilities of ``targets`` in the first ``scored_tiles`` tiles: a tile's logits at a time."""
    rows = bucket.rows * TILE
    none = SampledLogprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.full((rows, MAX_TOP_LOGPROBS), -1, jnp.int32),
        jnp.zeros((rows, MAX_TOP_LOGPROBS), jnp.float32),
    )

    def tile(i: jax.Array, out: SampledLogprobs) -> SampledLogprobs:
        part = jax.lax.dynamic_slice_in_dim(hidden, i * TILE, TILE)
        targets = jax.lax.dynamic_slice_in_dim(x["targets"], i * TILE, TILE)
        new = score(_allowed(model.logits(part), bucket), targets)
        return jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, i * TILE, 0), out, new
        )

    return jax.lax.fori_loop(0, x["scored_tiles"], tile, none)


def decode_step(
    graph: Any, bucket: Bucket, parameters: Any, state: DeviceState, buffer: jax.Array, extras: Extras
):
    """Up to ``bucket.steps`` decode steps; a row leaves at its own step limit or at a stop token."""
    model = nnx.merge(graph, parameters)
    x = bucket.layout.unpack(buffer)
    rows = bucket.rows

    def step(i, carry):
        state, alive, out = carry
        active = alive & (i < x["steps"])
        batch = decode_batch(x, state, active, i)
        hidden, caches = model.forward(batch, state.caches)
        logits = model.logits(hidden)
        new, sampler, tokens = sample_rows(logits, bucket, x, state.sampler, batch, active, step=i)
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


def decode_batch(x: Mapping[str, jax.Array], state: DeviceState, active: jax.Array, i: Any) -> Batch:
    """The batch of step i of a dispatch; rows that are not active are padding."""
    rows = active.shape[0]
    position = jnp.where(active, x["positions"] + i, -1)
    slot = jnp.where(active, x["slot"], 0)
    rope = None
    if "rope_delta" in x:
        rope = jnp.tile((position + x["rope_delta"])[:, None], (1, 3))
    return Batch(
        tokens=state.sampler.last_token[slot],
        positions=position,
        tile_sequence=jnp.zeros((0,), jnp.int32),
        context_length=position + 1,
        slot=slot,
        page_table=x["page_table"],
        logit_rows=jnp.arange(rows, dtype=jnp.int32),
        rope_positions=rope,
        mode=Mode.DECODE,
    )


def sample_rows(
    logits: jax.Array,
    bucket: Bucket,
    x: Mapping[str, jax.Array],
    sampler: SamplerState,
    batch: Batch,
    emits: jax.Array,
    step: Any = 0,
) -> tuple[StepOutput, SamplerState, jax.Array]:
    """Samples int32[B] tokens: the output, which shows those of emitting rows; what remembers them; all.

    Where the dispatch's ``forced`` has a token for ``step``, it takes the place of the sampled one.
    """
    logits = _allowed(logits, bucket)
    settings = SamplingRows(**{f.name: x[f.name] for f in dataclasses.fields(SamplingRows)})
    tokens, logprobs = sample(
        logits, settings, sampler, batch.slot, batch.context_length, x["stop_tokens"], x["min_position"]
    )
    tokens = jnp.where(x["forced"][:, step] >= 0, x["forced"][:, step], tokens)
    shown = jnp.where(emits, tokens, -1)
    out = StepOutput(shown, logprobs.sampled, logprobs.top_ids, logprobs.top_logprobs)
    return out, record_tokens(sampler, batch.slot, tokens, emits), tokens


def _allowed(logits: jax.Array, bucket: Bucket) -> jax.Array:
    """Logits without the ids that no token stands for."""
    if bucket.vocab_limit is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < bucket.vocab_limit, logits, -jnp.inf)


STEPS = {"prefill": prefill_step, "decode": decode_step}
