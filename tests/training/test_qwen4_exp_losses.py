"""What Qwen4Exp learns beside the next token, and who is taught by it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybridjax.batch import Batch
from hybridjax.models import ARCHITECTURES
from hybridjax.ops import attention_by_block, index_loss, load_balancing_loss
from hybridjax.training.diagnostics import diagnose
from hybridjax.training.experiments import EXPERIMENTS
from hybridjax.training.parameters import ParameterLayout
from hybridjax.training.step import token_nats
from hybridjax.training.trainer import build_model

ROWS, LENGTH = 2, 100


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(q, k, index_q, index_keys, positions, ratio, scale):
    """float64: each row's KL divergence, None where fewer than two blocks are complete, and its target."""
    out, targets = [], []
    heads, groups = q.shape[1], k.shape[1]
    for row, position in enumerate(positions):
        complete = (position + 1) // ratio
        target = np.zeros(k.shape[0] // ratio)
        for h in range(heads if complete else 0):
            weights = softmax(scale * k[: complete * ratio, h // (heads // groups)] @ q[row, h])
            target[:complete] += weights.reshape(-1, ratio).sum(1) / heads
        targets.append(target)
        if complete < 2:
            out.append(None)
            continue
        scores = np.maximum(index_q[row] @ index_keys[:complete].T, 0).sum(0) / np.sqrt(index_q.shape[-1])
        wanted = target[:complete]
        out.append(float(np.sum(wanted * (np.log(wanted) - np.log(softmax(scores))))))
    return out, np.stack(targets)


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    sizes = {"q": (256, 4, 8), "k": (256, 2, 8), "index_q": (256, 2, 8), "index_keys": (64, 8)}
    return {name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in sizes.items()}


POSITIONS = np.concatenate([np.arange(128), np.where(np.arange(128) < LENGTH, np.arange(128), -1)])


def test_the_loss_is_the_divergence_from_dense_attention(tensors):
    expected = []
    for s in range(2):
        rows, blocks = slice(128 * s, 128 * s + 128), slice(32 * s, 32 * s + 32)
        parts = [np.asarray(tensors[n][rows], np.float64) for n in ("q", "k", "index_q")]
        found, targets = reference(
            *parts, np.asarray(tensors["index_keys"][blocks], np.float64), POSITIONS[rows], 4, 0.5
        )
        expected += [x for x in found if x is not None]
        by_block = attention_by_block(
            *(tensors[n][rows] for n in ("q", "k")),
            jnp.asarray(POSITIONS[rows]),
            block_size=4,
            scale=0.5,
        )
        np.testing.assert_allclose(by_block, targets, atol=1e-6)
    loss = index_loss(**tensors, positions=jnp.asarray(POSITIONS), sequences=2, block_size=4, scale=0.5)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)


def test_the_loss_teaches_the_index_alone_and_is_zero_without_blocks(tensors):
    def loss(tensors, positions=POSITIONS):
        positions = jnp.asarray(positions)
        return index_loss(**tensors, positions=positions, sequences=2, block_size=4, scale=0.5)

    grads = jax.grad(loss)(tensors)
    assert not grads["q"].any() and not grads["k"].any()
    assert jnp.abs(grads["index_q"]).max() > 0 and jnp.abs(grads["index_keys"]).max() > 0
    assert not grads["index_q"][POSITIONS < 7].any()
    assert float(loss(tensors, np.full(256, -1))) == 0.0


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(
        EXPERIMENTS["tiny_flash_next_debug"]().model,
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=("indexed_attention",),
        ple_layer_ids=(),
        indexer_budget=32,
    )
    return ARCHITECTURES[config.architecture].model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def rows():
    window = np.random.default_rng(1).integers(5, 300, (ROWS, LENGTH + 1)).astype(np.int32)
    mask = np.ones((ROWS, LENGTH), bool)
    mask[1, 40:60] = False
    return window[:, :-1], window[:, 1:], mask


@pytest.fixture(scope="module")
def found(model, rows):
    """Logits, losses, and the gradient of each loss by tensor name."""
    layout = ParameterLayout.of(model)

    def losses(tensors):
        logits, losses = layout.model(tensors, jnp.float32).training_losses(*rows)
        return losses, logits

    jacobian = jax.jit(jax.jacrev(losses, has_aux=True))
    tensors = layout.tensors(model)
    grads, logits = jacobian(tensors)
    return logits, jax.jit(losses)(tensors)[0], grads


def test_logits_and_losses_are_those_of_the_parts(model, rows, found):
    inputs, targets, mask = rows
    logits, losses, _ = found
    assert set(losses) == set(model.training_loss_names) == {"router", "indexer", "mtp"}
    seen = {}

    def parts(inputs, targets):
        seen.clear()
        batch = Batch.whole(inputs)
        streams, _ = model.forward(batch, None, seen.__setitem__)
        drafted, _ = model.draft(Batch.whole(targets), streams, None, seen.__setitem__)
        draft = model.draft_logits(drafted).reshape(ROWS, -1, 300)[:, :LENGTH]
        router = [
            load_balancing_loss(seen[n + ".router_probs"], seen[n + ".expert_ids"], batch.positions >= 0)
            for n in ("layers.0", "mtp")
        ]
        return model(inputs), token_nats(draft[:, :-1], targets[:, 1:])[0], jnp.stack(router)

    plain, nats, router = jax.jit(parts)(inputs, targets)
    np.testing.assert_allclose(logits, plain, atol=2e-6)
    counted = mask[:, 1:] & mask[:, :-1]
    assert float(losses["mtp"]) == pytest.approx(np.asarray(nats)[counted].mean(), rel=1e-5)
    assert float(losses["router"]) == pytest.approx(np.asarray(router).mean(), rel=1e-5)
    assert float(losses["indexer"]) > 0


def test_each_loss_reaches_its_own_parameters(found):
    reached = {
        loss: {name for name, gradient in grads.items() if jnp.any(gradient != 0)}
        for loss, grads in found[2].items()
    }
    index = {name for name in found[2]["mtp"] if ".indexer." in name}
    assert len(index) == 6 and reached["indexer"] == index
    assert not reached["mtp"] & index and not reached["router"] & index
    assert {"model.embed_tokens.weight", "lm_head.weight", "mtp.fc_hidden.weight"} <= reached["mtp"]
    assert {f"{n}.mlp.gate.weight" for n in ("model.layers.0", "mtp.layers.0")} <= reached["router"]


def test_recomputing_layers_changes_no_loss(model, rows, found):
    model.remat = True
    try:
        layout = ParameterLayout.of(model)
    finally:
        model.remat = False

    def losses(tensors):
        return layout.model(tensors, jnp.float32).training_losses(*rows)[1]

    losses = jax.jit(losses)(layout.tensors(model))
    for name, value in losses.items():
        assert float(value) == pytest.approx(float(found[1][name]), rel=1e-5), name


def test_decays_stay_float32_in_a_bfloat16_model():
    model = build_model(EXPERIMENTS["tiny_flash_next_debug"]())
    layout = ParameterLayout.of(model)
    half = layout.model(layout.tensors(model), jnp.bfloat16)
    dtypes = {path: v.get_value().dtype for path, v in nnx.to_flat_state(nnx.state(half, nnx.Param))}
    wide = {path[-1] for path, dtype in dtypes.items() if dtype == jnp.float32}
    assert wide == {"A_log", "dt_bias"} and len(set(dtypes.values())) == 2


def test_diagnostics_measure_the_model(model, rows):
    inputs, _, _ = rows
    report = diagnose(model, inputs)
    assert (report["rows"], report["length"]) == (ROWS, LENGTH)
    assert list(report["expert_load"]) == ["layers.0", "mtp"]
    assert all(1 <= load <= 4 for load in report["expert_load"].values())
    following = np.pad(inputs[:, 1:], ((0, 0), (0, 1)))

    def both(inputs, following):
        streams, _ = model.forward(Batch.whole(inputs), None)
        drafted, _ = model.draft(Batch.whole(following), streams, None)
        return model.draft_logits(drafted), model.logits(streams)

    draft, trunk = (np.asarray(x).argmax(-1).reshape(ROWS, -1) for x in jax.jit(both)(inputs, following))
    draft, trunk = draft[:, : LENGTH - 2], trunk[:, 1 : LENGTH - 1]
    assert report["mtp_agreement"] == pytest.approx((draft == trunk).mean(), abs=0.011)
    share = report["attention_share"]
    assert list(share["layers"]) == ["layers.0", "mtp"]
    for values in share["layers"].values():
        assert 0 < values["chosen"] <= values["best"] <= 1 + 1e-6 and values["latest"] <= values["best"]
    # Rows with more than 8 complete blocks of 4: positions 35 .. 99.
    expected = np.mean([8 / ((p + 1) // 4) for p in range(35, LENGTH)])
    assert share["random"] == pytest.approx(expected, rel=1e-5)
