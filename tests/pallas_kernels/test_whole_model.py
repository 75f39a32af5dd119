"""A model at released widths on a GPU: the kernels are what serving gets by itself, and change no answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.configs import MiniCPMSALAConfig
from hybridjax.configs.minicpm_sala import LINEAR, SPARSE
from hybridjax.models.minicpm_sala import MiniCPMSALA
from hybridjax.ops.dispatch import override

KERNELS = {
    "hybridjax.pallas_kernels.simple_gla.hopper": "prefill",
    "hybridjax.pallas_kernels.simple_gla.decode": "decode",
}
PROMPT, STEPS = 192, 8


def logits(model, ids):
    """float32[STEPS + 1, vocab]: after a prompt and after each of the tokens that follow, decoded."""
    state = model.init_state(6, 2)

    def batch(start, end, mode):
        tiles = (end - start) // TILE
        return Batch(
            tokens=jnp.asarray(ids[start:end]),
            positions=jnp.arange(start, end, dtype=jnp.int32),
            tile_sequence=jnp.zeros((tiles,), jnp.int32),
            context_length=jnp.array([end], jnp.int32),
            slot=jnp.ones((1,), jnp.int32),
            page_table=jnp.arange(1, 6, dtype=jnp.int32)[None],
            logit_rows=jnp.array([end - start - 1], jnp.int32),
            initial_slot=jnp.ones((1,), jnp.int32),
            snapshot_slot=jnp.zeros((tiles,), jnp.int32),
            mode=mode,
        )

    @nnx.jit
    def step(model, batch, state):
        hidden, state = model.forward(batch, state)
        return model.logits(hidden[batch.logit_rows]), state

    out = []
    for start, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))]:
        mode = Mode.PREFILL if end - start > 1 else Mode.DECODE
        got, state = step(model, batch(start, end, mode), state)
        out.append(np.asarray(got[0]))
    return np.stack(out)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs the compiled kernels")
def test_kernels_are_chosen_and_agree_with_xla(monkeypatch):
    ran = set()
    for module, name in KERNELS.items():
        original = getattr(__import__(module, fromlist=[name]), name)

        def noted(*args, original=original, name=name, **kwargs):
            ran.add(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(f"{module}.{name}", noted)
    kinds = (SPARSE, LINEAR, LINEAR, LINEAR)
    config = dataclasses.replace(
        MiniCPMSALAConfig(), num_hidden_layers=4, mixer_types=kinds, vocab_size=4096, eos_token_id=(2,)
    )
    model = nnx.jit(lambda: MiniCPMSALA(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))()
    ids = np.random.default_rng(0).integers(3, 4096, PROMPT + STEPS).astype(np.int32)
    with override("simple_gla_prefill=xla,simple_gla_decode=reference"):
        want = logits(model, ids)
    assert not ran
    got = logits(model, ids)
    assert ran == {"prefill", "decode"}
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    print(f"relative differences of logits: {error}")
    assert error.max() < 0.02
