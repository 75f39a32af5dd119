"""A run continued from a checkpoint is bit for bit the run that was never interrupted."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hybridjax.checkpoints.orbax_checkpoints import TrainingCheckpoints
from hybridjax.errors import CheckpointError

OPTIMIZER = optax.adamw(1e-2)


def start() -> dict:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "layers": [
            {"w": jax.random.normal(keys[0], (3, 4), jnp.bfloat16)},
            {"w": jax.random.normal(keys[1], (4, 2))},
        ],
        "a.b": jnp.float32(2),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params), "extra": {"row": 0}}


@jax.jit
def _step(params, opt_state, row):
    def loss(params):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), row), (5, 3))
        y = x @ params["layers"][0]["w"].astype(jnp.float32) @ params["layers"][1]["w"] * params["a.b"]
        return jnp.mean((y - 1) ** 2)

    grads = jax.grad(loss)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(state: dict, steps: int) -> dict:
    params, opt_state, row = state["params"], state["opt_state"], state["extra"]["row"]
    for _ in range(steps):
        params, opt_state = _step(params, opt_state, row)
        row += 1
    return {"params": params, "opt_state": opt_state, "extra": {"row": row}}


def assert_bit_equal(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_resuming_is_bit_exact(tmp_path):
    middle = train(start(), 3)
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(3, middle)
    with TrainingCheckpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(checkpoints.latest_step(), start())
    assert_bit_equal(restored, middle)
    assert isinstance(restored["params"]["layers"][0]["w"], jax.Array)
    assert_bit_equal(train(restored, 4), train(start(), 7))


def test_only_the_newest_steps_are_kept(tmp_path):
    with TrainingCheckpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None and checkpoints.all_steps() == []
        for step in (1, 5, 9):
            checkpoints.save(step, start() | {"extra": {"step": step}})
        assert checkpoints.all_steps() == [5, 9] and checkpoints.latest_step() == 9
        assert checkpoints.restore(5, {})["extra"] == {"step": 5}
        with pytest.raises(CheckpointError, match="no step 1; complete steps: 5, 9"):
            checkpoints.restore(1, {})
        for step in (9, 3):
            with pytest.raises(CheckpointError, match=f"step {step} is not above the newest, 9"):
                checkpoints.save(step, start())


def test_abstract_leaves_and_single_groups(tmp_path):
    state = start()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state["params"])
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(1, {"params": like})
    assert restored.keys() == {"params", "extra"}
    assert_bit_equal(restored["params"], state["params"])


def test_numpy_scalars_and_empty_trees(tmp_path):
    state = {"params": np.arange(3, dtype=np.int64), "count": {"n": np.int32(4)}, "empty": optax.EmptyState()}
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        restored = checkpoints.restore(0, state)
    assert restored["params"].dtype == np.int64 and restored["params"].tolist() == [0, 1, 2]
    assert restored["count"]["n"] == 4 and restored["empty"] == optax.EmptyState()
    assert restored["extra"] == {}


def test_values_that_are_not_numbers_survive(tmp_path):
    bits = np.uint32([0x7FC00001, 0xFFC12345, 0x80000000, 1])
    state = {"params": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)}
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(1, state)["params"]
    assert np.array_equal(np.asarray(restored).view(np.uint32), bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.b": jnp.bfloat16(2)}, r"params.a.b is float32\[\] in the checkpoint, bfloat16\[\] here"),
        ({"a.b": jnp.zeros(3)}, r"params.a.b is float32\[\] in the checkpoint, float32\[3\] here"),
        ({"new": jnp.zeros(3)}, r"params.new is absent in the checkpoint, float32\[3\] here"),
        ({"layers": []}, r"params.layers.0.w is bfloat16\[3, 4\] in the checkpoint, absent here"),
    ],
)
def test_mismatches_are_named(tmp_path, change, message: str):
    state = start()
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(1, {"params": state["params"] | change})
        with pytest.raises(
            CheckpointError, match="ema is not in the checkpoint, which has opt_state, params"
        ):
            checkpoints.restore(1, {"ema": state["params"]})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"params": {"a": 1.0}}, "params.a is a float; leaves must be arrays"),
        ({"params": jax.random.key(0)}, "params.value is a typed PRNG key"),
        ({"params": {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}}, "two leaves of params are called a.b"),
        ({"extra": {"x": jnp.ones(1)}}, "extra cannot be stored as JSON"),
    ],
)
def test_what_cannot_be_stored(tmp_path, state, message: str):
    with TrainingCheckpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(1, state)
        assert checkpoints.latest_step() is None


def test_the_runs_settings_are_stored_and_compared(tmp_path):
    with TrainingCheckpoints(tmp_path, config={"lr": 0.1, "betas": (0.9, 0.95)}) as checkpoints:
        assert checkpoints.config == {"lr": 0.1, "betas": [0.9, 0.95]}
    with TrainingCheckpoints(tmp_path, config={"betas": [0.9, 0.95], "lr": 0.1}):
        pass
    with TrainingCheckpoints(tmp_path) as checkpoints:
        assert checkpoints.config == {"lr": 0.1, "betas": [0.9, 0.95]}
    with pytest.raises(
        CheckpointError, match="other settings: lr is 0.1 there, 0.2 now; seed is None there, 1 now"
    ):
        TrainingCheckpoints(tmp_path, config={"lr": 0.2, "betas": [0.9, 0.95], "seed": 1})


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format_version": 2}'])
def test_other_formats_are_refused(tmp_path, content: str):
    (tmp_path / "training.json").write_text(content)
    with pytest.raises(CheckpointError, match="training.json: "):
        TrainingCheckpoints(tmp_path)


def test_an_interrupted_save_is_not_a_step(tmp_path):
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, start())
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    with TrainingCheckpoints(tmp_path) as checkpoints:
        assert checkpoints.all_steps() == [1]
        checkpoints.save(2, start())
        assert_bit_equal(checkpoints.restore(2, start()), start())


@pytest.mark.parametrize("part", ["params", "extra", "manifest"])
def test_damaged_steps_are_named(tmp_path, part: str):
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, start())
    shutil.rmtree(tmp_path / "1" / part)
    with TrainingCheckpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="1 is damaged"):
            checkpoints.restore(1, start())


def test_the_run_file_is_plain_json(tmp_path):
    TrainingCheckpoints(tmp_path, config={"a": 1}).close()
    assert json.loads((tmp_path / "training.json").read_text()) == {"format_version": 1, "config": {"a": 1}}
