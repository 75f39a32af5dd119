"""What a layer's matrices see, against sums that NumPy makes of the same rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_fakes import GOLDENS

from hybridjax.calibration import observe as observing
from hybridjax.calibration.observe import counts, expert_inputs, observe
from hybridjax.calibration.selection import make_plan
from hybridjax.calibration.streaming import LayerStream
from hybridjax.calibration.text import Sample, batches
from hybridjax.checkpoints import load_model
from hybridjax.ops import swiglu

RNG = np.random.default_rng(0)
SAMPLES = [Sample(RNG.integers(0, 90, n).astype(np.int32), n) for n in (100, 70, 128)]


def a_layer(name: str, index: int):
    """A layer of a golden model, its plan, and the hidden states before it, with poison in the padding."""
    stream = LayerStream(GOLDENS / name)
    plan = make_plan(stream.model, stream.weights, ()).layers[index]
    work = batches(SAMPLES)
    hidden = [stream.embed(tokens) for tokens in work]
    for i in range(index):
        run = stream.layer(i)
        hidden = [run(h, t.whole(), stream.ngram_rows(i, t)) for h, t in zip(hidden, work)]
    hidden = [np.where(tokens.live[:, None], h, np.float32(1e3)) for h, tokens in zip(hidden, work)]
    rows = [stream.ngram_rows(index, tokens) for tokens in work]
    return stream.layer(index), plan, [(h, t.whole(), r) for h, t, r in zip(hidden, work, rows)], work


def gram(rows):
    wide = np.asarray(rows, np.float64)
    return wide.T @ wide


def test_hessians_of_linear_layers_are_sums_over_rows_that_are_no_padding():
    name = "minicpm_sala/dense"
    layer, plan, inputs, work = a_layer(name, 1)
    seen = observe(layer, plan, inputs)
    module = load_model(GOLDENS / name).layers[1]
    rows = [(h[t.live], batch) for (h, batch, _), t in zip(inputs, work)]
    assert seen.rows == sum(len(s.ids) for s in SAMPLES)
    normed = np.concatenate([module.input_norm(jnp.asarray(h)) for h, _ in rows])
    found = seen.linears[("mixer", "in_proj")]
    np.testing.assert_allclose(found.hessian, gram(normed), rtol=1e-5, atol=1e-4)
    assert float(found.largest) == np.abs(normed).max()

    # The input of the last matrix, from the layer's own parts.
    @jax.jit
    def last(hidden, batch):
        mixed, _ = module.mixer(module.input_norm(hidden), batch, None)
        after = hidden + mixed * module.residual_scale
        return swiglu(module.mlp.gate_up(module.mlp_norm(after)))

    between = [np.asarray(last(h, batch))[t.live] for (h, batch, _), t in zip(inputs, work)]
    wanted = gram(np.concatenate(between))
    found = seen.linears[("mlp", "down")]
    np.testing.assert_allclose(found.hessian, wanted, rtol=1e-4, atol=1e-5 * wanted.max())


@pytest.fixture(scope="module")
def experts():
    layer, plan, inputs, work = a_layer("qwen4_exp/text_small", 0)
    seen = observe(layer, plan, inputs)
    ((path, rows),) = seen.experts.items()
    parameters = layer.parameters()
    return rows, parameters[(*path, "gate_up")], parameters[(*path, "down")], seen, work


def test_experts_see_the_rows_that_are_routed_to_them(experts):
    rows, gate_up, _, seen, work = experts
    tokens = counts(rows, gate_up.shape[0])
    assert tokens.sum() == 3 * seen.rows == 3 * sum(len(s.ids) for s in SAMPLES)
    for (_, ids), batch in zip(rows, work):
        assert ((ids >= 0).all(axis=1) == batch.live).all()


@pytest.mark.parametrize("chunk", [16, 256])
def test_hessians_of_experts(experts, chunk, monkeypatch):
    monkeypatch.setattr(observing, "_CHUNK", chunk)
    rows, gate_up, _, _, _ = experts
    before, between = expert_inputs(rows, gate_up[2:5], 2)
    for place, expert in enumerate(range(2, 5)):
        own = np.concatenate([x[(ids == expert).any(axis=1)] for x, ids in rows])
        np.testing.assert_allclose(before.hessian[place], gram(own), rtol=1e-5, atol=1e-6)
        assert float(before.largest[place]) == np.abs(own).max()
        gate, up = np.split(own.astype(np.float64) @ np.asarray(gate_up[expert], np.float64).T, 2, axis=1)
        hidden = np.asarray(jax.nn.silu(gate.astype(np.float32)), np.float64) * up
        wanted = gram(hidden)
        np.testing.assert_allclose(between.hessian[place], wanted, rtol=1e-4, atol=1e-5 * wanted.max())


def test_an_expert_without_rows_has_seen_nothing(experts):
    rows, gate_up, _, _, _ = experts
    without = [(x, np.where(ids == 3, -1, ids)) for x, ids in rows]
    before, between = expert_inputs(without, gate_up[3:4], 3)
    assert not np.asarray(before.hessian).any() and not np.asarray(between.hessian).any()
    assert float(before.largest[0]) == 0
