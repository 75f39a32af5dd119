"""Training: exact resume, a falling loss, clean stops, and what a run writes."""

import dataclasses
import itertools
import json
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_fakes import (
    VOCABULARY,
    Bigram,
    MemoryCheckpoints,
    bigram,
    small_experiment,
    small_model,
)

from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.training.config import OptimizerConfig
from hybridjax.training.data import TokenBatch
from hybridjax.training.experiments import override
from hybridjax.training.optimizers import make_optimizer
from hybridjax.training.parameters import ParameterLayout
from hybridjax.training.step import DataParallel, make_train_step, split_batch, token_nats
from hybridjax.training.trainer import Trainer, TrainingError, build_model, stop_on_signals

ONE = jax.devices()[:1]


ADAMW = OptimizerConfig(name="adamw")


@pytest.fixture(scope="module")
def plain(prepared):
    """A trainer of the stand-in model with checkpoints in memory; its clock ticks at every look."""
    ticks = itertools.count()
    return Trainer(
        small_experiment(optimizer=ADAMW, checkpoint_every=3),
        prepared,
        model=bigram,
        checkpoints=MemoryCheckpoints(),
        devices=ONE,
        clock=lambda: float(next(ticks)),
    )


class StopAfter:
    """An event that is set once it was asked this often."""

    def __init__(self, questions):
        self._left = questions

    def is_set(self):
        self._left -= 1
        return self._left < 0


def memory(trainer):
    return trainer._open_checkpoints


def lines(directory):
    return [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def test_the_loss_of_the_hybrid_model_falls(hybrid, uninterrupted, one_device_losses):
    result = uninterrupted[1]
    assert one_device_losses[-1] < one_device_losses[0] - 1
    untrained = hybrid.evaluate(hybrid.layout.tensors(build_model(hybrid.config)))
    trained = hybrid.evaluate(result.tensors)
    assert trained["all"]["bits_per_byte"] < 0.8 * untrained["all"]["bits_per_byte"]


@pytest.mark.parametrize("steps", [3, 17])
def test_an_interrupted_run_resumes_to_the_same_bits(hybrid, uninterrupted, tmp_path, steps):
    whole = uninterrupted[1]
    first = hybrid.run(tmp_path, stop=StopAfter(steps))
    assert (first.steps, first.finished) == (steps, False)
    assert any((whole.tensors[name] != first.tensors[name]).any() for name in whole.tensors)
    second = hybrid.run(tmp_path, resume=True)
    assert (second.steps, second.finished, second.tokens) == (24, True, whole.tokens)
    assert_same_bits(whole.tensors, second.tensors)


def test_metrics_have_the_promised_fields_and_the_evaluation(plain, prepared, tmp_path):
    result = plain.run(tmp_path)
    logged = [x for x in lines(tmp_path) if "loss" in x]
    assert [x["step"] for x in logged] == [2, 3, 4, 6]
    names = {"step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens", "tokens_per_second"}
    assert all(x.keys() == names for x in logged)
    assert result.tokens == logged[-1]["tokens"] == 6 * 4 * 64
    assert logged[0]["tokens_per_second"] == pytest.approx(2 * 4 * 64 / 2)
    ratio = logged[0]["loss"] / np.log(2) / prepared.bytes_per_token
    assert logged[0]["bits_per_byte"] == pytest.approx(ratio)
    evaluations = [x for x in lines(tmp_path) if "evaluation" in x]
    assert [x["step"] for x in evaluations] == [6]
    assert evaluations[0]["evaluation"]["all"] == plain.evaluate(result.tensors)["all"]


def test_a_finished_run_must_be_resumed_and_stays_as_it_is(plain, tmp_path):
    done = plain.run(tmp_path)
    with pytest.raises(ConfigError, match="holds a run that stands at step 6"):
        plain.run(tmp_path)
    again = plain.run(tmp_path, resume=True)
    assert again.finished and again.steps == 6
    assert_same_bits(done.tensors, again.tensors)


def test_resuming_forgets_the_metrics_of_steps_that_are_repeated(plain, tmp_path):
    plain.run(tmp_path)
    del memory(plain).saved[str(tmp_path / "checkpoints")][6]
    plain.run(tmp_path, resume=True)
    assert [x["step"] for x in lines(tmp_path) if "loss" in x] == [2, 3, 4, 6]


def test_a_stop_leaves_a_checkpoint_and_an_unfinished_result(plain, tmp_path):
    late = plain.run(tmp_path / "late", max_seconds=8)
    assert 0 < late.steps < 6 and not late.finished
    assert memory(plain).latest_step() == late.steps
    event = threading.Event()
    event.set()
    stopped = plain.run(tmp_path / "stopped", stop=event)
    assert stopped.steps == 0 and not stopped.finished
    assert memory(plain).latest_step() is None


def test_another_experiment_cannot_resume_a_run(prepared, tmp_path):
    arguments = {"model": bigram, "devices": ONE}
    config = small_experiment(optimizer=ADAMW)
    Trainer(config, prepared, **arguments).run(tmp_path, stop=StopAfter(1))
    changed = override(config, "optimizer.learning_rate=1e-4")
    with pytest.raises(CheckpointError, match="optimizer.learning_rate is 0.003 there, 0.0001 now"):
        Trainer(changed, prepared, **arguments).run(tmp_path, resume=True)
    observed = override(config, "log_every=1")
    assert Trainer(observed, prepared, **arguments).run(tmp_path, resume=True, stop=StopAfter(0)).steps == 1


def test_a_loss_that_is_not_finite_stops_training_and_names_the_step(prepared, tmp_path):
    class Broken(Bigram):
        def __call__(self, input_ids):
            return super().__call__(input_ids) * jnp.nan

    checkpoints = MemoryCheckpoints()
    config = small_experiment(optimizer=ADAMW)
    trainer = Trainer(config, prepared, model=lambda c: Broken(VOCABULARY), checkpoints=checkpoints)
    with pytest.raises(TrainingError, match="step 1: loss nan"):
        trainer.run(tmp_path)
    assert not checkpoints.saved


def test_a_vocabulary_smaller_than_the_data_is_refused(prepared):
    with pytest.raises(ConfigError, match="model.vocab_size is 299; the prepared data needs at least 300"):
        Trainer(small_experiment(model=small_model(vocab_size=299)), prepared, model=bigram)


def test_the_first_signal_sets_the_event_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def updater(config):
    """Applies one update to a fresh stand-in model; compiles once per shape."""
    layout, parallel = ParameterLayout.of(Bigram(VOCABULARY)), DataParallel(ONE)
    tensors = layout.tensors(Bigram(VOCABULARY))
    optimizer = make_optimizer(config, tensors)
    step = make_train_step(layout, optimizer, config, parallel)

    def update(batch):
        fresh = jax.tree.map(jnp.copy, tensors)
        arrays = parallel.put(*split_batch(batch, config.microbatches), axis=1)
        return step(fresh, optimizer.init(fresh), np.int32(0), *arrays)

    return update


def random_batch(rows=4, length=12):
    window = np.random.default_rng(0).integers(5, VOCABULARY, (rows, length + 1)).astype(np.int32)
    return TokenBatch(window[:, :-1], window[:, 1:], np.ones((rows, length), bool))


def test_microbatches_add_up_to_the_batch():
    whole = updater(small_experiment(optimizer=ADAMW))(random_batch())
    parts = updater(small_experiment(optimizer=ADAMW, microbatches=2))(random_batch())
    assert float(whole[2]["loss"]) == pytest.approx(float(parts[2]["loss"]), rel=1e-6)
    assert float(whole[2]["grad_norm"]) == pytest.approx(float(parts[2]["grad_norm"]), rel=1e-5)


def test_masked_targets_have_no_say():
    batch = random_batch()
    mask = batch.mask.copy()
    mask[:, 6:] = False
    targets = batch.targets.copy()
    targets[:, 6:] = 7
    masked = dataclasses.replace(batch, mask=mask)
    changed = dataclasses.replace(batch, mask=mask, targets=targets)
    update = updater(small_experiment(optimizer=ADAMW))
    a, b = update(masked), update(changed)
    assert_same_bits(a[0], b[0])
    short = update(TokenBatch(batch.inputs[:, :6], batch.targets[:, :6], batch.mask[:, :6]))
    assert float(a[2]["loss"]) == pytest.approx(float(short[2]["loss"]), rel=1e-6)


def test_token_nats_match_a_float64_softmax():
    logits = np.random.default_rng(0).normal(size=(3, 5, 11)) * 10
    targets = np.random.default_rng(1).integers(0, 11, (3, 5))
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    found, normaliser = token_nats(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(normaliser, np.log(np.exp(logits).sum(-1)), rtol=1e-6)


def test_rows_that_do_not_fit_the_devices_are_refused():
    parallel = DataParallel(ONE)
    parallel.size = 3
    with pytest.raises(ConfigError, match="4 rows cannot be split over 3 devices"):
        parallel.put(np.zeros((4, 2)))
