"""A model run layer by layer from its files is the model."""

import jax
import numpy as np
import pytest
from calibration_fakes import GOLDENS

from hybridjax.calibration.perplexity import measure
from hybridjax.calibration.streaming import LayerStream
from hybridjax.calibration.text import Sample, batches
from hybridjax.checkpoints import load_model

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("name", ["minicpm_sala/dense", "qwen4_exp/multimodal"])
def test_the_cost_of_a_text_is_that_of_the_whole_model(name):
    directory = GOLDENS / name
    samples = [Sample(RNG.integers(0, 90, n).astype(np.int32), 3 * n) for n in (70, 100, 128)]
    steps = []
    found = measure(directory, samples, step=lambda: steps.append(1))
    model = load_model(directory)
    forward = jax.jit(lambda ids: jax.nn.log_softmax(model(ids)[0]))
    wanted = 0.0
    for sample in samples:
        # Of one shape; what follows a sample changes nothing before it.
        ids = np.resize(sample.ids, 128)
        logs = np.asarray(forward(ids[None]))
        wanted -= float(sum(logs[i, t] for i, t in enumerate(sample.ids[1:])))
    assert found.nats == pytest.approx(wanted, rel=1e-5)
    assert (found.tokens, found.bytes, len(steps)) == (295, 894, len(model.layers))
    assert found.bits_per_byte == pytest.approx(found.nats / 894 / np.log(2))


def test_costs_are_counted_where_a_token_follows():
    stream = LayerStream(GOLDENS / "minicpm_sala/dense")
    model = load_model(GOLDENS / "minicpm_sala/dense")
    (tokens,) = batches([Sample(RNG.integers(0, 90, n).astype(np.int32), n) for n in (20, 64)])
    hidden, other = RNG.standard_normal((2, 128, 64)).astype(np.float32) * 5
    logs, known = (np.asarray(jax.nn.log_softmax(model.logits(h)), np.float64) for h in (hidden, other))
    rows = np.concatenate([np.arange(19), 64 + np.arange(63)])
    targets = tokens.ids.reshape(-1)[rows + 1]
    nats, divergence = stream.costs(hidden, tokens, other)
    assert nats == pytest.approx(-logs[rows, targets].sum(), rel=1e-5)
    assert divergence == pytest.approx((np.exp(known) * (known - logs))[rows].sum(), rel=1e-5)
    assert divergence > 1 and stream.costs(hidden, tokens)[1] == 0


def test_layers_of_one_kind_share_their_structure():
    stream = LayerStream(GOLDENS / "minicpm_sala/dense")
    first, second, third, last = (stream.layer(i).graph for i in range(4))
    assert first == last and second == third and first != second
    assert hash(first) == hash(last)


def test_only_the_ends_are_read_before_a_layer_is_asked_for():
    stream = LayerStream(GOLDENS / "minicpm_sala/dense")
    leaves = jax.tree.leaves(stream.ends)
    assert sorted(leaf.shape for leaf in leaves) == [(64,), (97, 64), (97, 64)]
    layer = stream.layer(2)
    assert all(isinstance(value, jax.Array) for value in layer.parameters().values())
