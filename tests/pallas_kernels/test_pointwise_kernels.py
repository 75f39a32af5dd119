"""The kernels around the recurrences against float64 formulas: interpreted on a CPU, compiled on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import interpreted

from hybridjax.pallas_kernels.pointwise import gated_delta_net, lightning, prompt
from hybridjax.pallas_kernels.state_update import Tuning

pytestmark = pytest.mark.usefixtures("no_races")

SIZE, EPS, THETA, SCALE = 128, 1e-6, 1e4, 0.09
HEADS, KEY_HEADS, VALUE_HEADS = 4, 1, 3
WIDTH, VALUES = HEADS * SIZE, VALUE_HEADS * SIZE
CHANNELS = 2 * KEY_HEADS * SIZE + VALUES
SLOPES = np.array([0.7, 0.2, 0.05, 0.01], np.float32)
SMALL = Tuning(columns=64, stages=2, resident=1)
# The first row starts afresh, the last two are the second and third of their sequences, two are padding.
SLOT, POSITIONS = [4, 0, 6, 0, 2, 1], [0, -1, 9, -1, 1, 2]


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(*arrays):
    found = [np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in arrays]
    return found[0] if len(found) == 1 else found


def close(got, want, tolerance):
    """Every vector along the last axis is within ``tolerance`` of the largest of its kind."""
    distance = np.linalg.norm(exact(got) - want, axis=-1)
    assert distance.max() <= tolerance * np.linalg.norm(want, axis=-1).max()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turned(x, positions):
    """x [..., H, 128] of tokens at positions [...]."""
    angle = np.asarray(positions)[..., None, None] * THETA ** (-np.arange(SIZE // 2) / (SIZE // 2))
    low, high = np.split(x, 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def lightning_weights():
    return [1 + 0.2 * normal(i, n) for i, n in ((1, SIZE), (2, SIZE), (3, WIDTH))]


def padded(x):
    """NaN in the rows that hold no token."""
    return jnp.where(jnp.asarray(POSITIONS)[:, None] < 0, jnp.nan, x)


def lightning_step(projected, pool, slot, positions, dtype=jnp.bfloat16):
    run = interpreted(lightning.decode)
    options = {"scale": SCALE, "eps": EPS, "theta": THETA, "gate": True, "tuning": SMALL}
    weights = [x.astype(dtype) for x in lightning_weights()]
    slot, positions = (jnp.asarray(x, jnp.int32) for x in (slot, positions))
    return run(projected, *weights, jnp.asarray(SLOPES), pool, slot, positions, **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_token_through_lightning_attention_touches_only_its_slots(dtype):
    projected = padded(normal(0, len(SLOT), 4 * WIDTH, dtype=dtype))
    pool = normal(9, 8, HEADS, SIZE, SIZE, dtype=jnp.float32).at[jnp.array([0, 3, 4, 7])].set(jnp.nan)
    y, after = lightning_step(projected, pool, SLOT, POSITIONS, dtype)
    q_norm, k_norm, o_norm = exact(*lightning_weights())
    for row, (own, position) in enumerate(zip(SLOT, POSITIONS)):
        if position < 0:
            continue
        q, k, v, gate = exact(projected[row]).reshape(4, HEADS, SIZE)
        q, k = turned(normed(q, q_norm), position), turned(normed(k, k_norm), position)
        before = np.zeros((HEADS, SIZE, SIZE)) if position == 0 else exact(pool[own])
        state = np.exp(-exact(SLOPES))[:, None, None] * before + k[:, :, None] * v[:, None, :]
        out = SCALE * np.einsum("hk,hkv->hv", q, state).reshape(-1)
        close(y[row], normed(out, o_norm) * sigmoid(gate.reshape(-1)), 0.01)
        close(after[own], state, 0.01)
    others = np.array([0, 3, 5, 7])
    np.testing.assert_array_equal(after[others], pool[others])


def delta_weights(dtype=jnp.bfloat16):
    return [
        0.5 * normal(1, CHANNELS, 1, 4, dtype=dtype),
        normal(2, VALUE_HEADS, dtype=jnp.float32),
        normal(3, VALUE_HEADS, dtype=jnp.float32),
        1 + 0.2 * normal(4, SIZE, dtype=dtype),
    ]


def delta_step(projected, pool, conv, slot, positions, activation="sigmoid"):
    run = interpreted(gated_delta_net.decode)
    options = {"key_heads": KEY_HEADS, "eps": EPS, "activation": activation, "tuning": SMALL}
    slot, positions = (jnp.asarray(x, jnp.int32) for x in (slot, positions))
    return run(projected, *delta_weights(projected.dtype), pool, conv, slot, positions, **options)


@pytest.mark.parametrize(("dtype", "activation"), [(jnp.bfloat16, "sigmoid"), (jnp.float16, "silu")])
def test_a_token_through_gated_delta_net_touches_only_its_slots(dtype, activation):
    projected = padded(normal(0, len(SLOT), CHANNELS + VALUES + 2 * VALUE_HEADS, dtype=dtype))
    pool = normal(9, 8, VALUE_HEADS, SIZE, SIZE, dtype=jnp.float32).at[jnp.array([0, 3, 4, 7])].set(jnp.nan)
    conv = normal(8, 8, 3, CHANNELS, dtype=dtype)
    for own, position in zip(SLOT, POSITIONS):
        conv = conv.at[own, : 3 - min(max(position, 0), 3)].set(jnp.nan)  # before the first token
    y, after, kept = delta_step(projected, pool, conv, SLOT, POSITIONS, activation)
    weight, A_log, bias, norm = exact(*delta_weights(dtype))
    for row, (own, position) in enumerate(zip(SLOT, POSITIONS)):
        if position < 0:
            continue
        qkv, z, b, a = np.split(exact(projected[row]), np.cumsum([CHANNELS, VALUES, VALUE_HEADS]))
        past = np.nan_to_num(np.concatenate([exact(conv[own]), qkv[None]]))
        np.testing.assert_array_equal(exact(kept[own]), past[1:])
        mixed = (past * weight[:, 0].T).sum(0)
        mixed = (mixed * sigmoid(mixed)).reshape(-1, SIZE)
        q, k = (np.repeat(x / np.sqrt((x * x).sum() + 1e-6), 3, axis=0) for x in (mixed[:1], mixed[1:2]))
        state = np.zeros((VALUE_HEADS, SIZE, SIZE)) if position == 0 else exact(pool[own])
        state = np.exp(-np.exp(A_log) * np.logaddexp(0, a + bias))[:, None, None] * state
        delta = sigmoid(b)[:, None] * (mixed[2:] - np.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * delta[:, None, :]
        out = SIZE**-0.5 * np.einsum("hk,hkv->hv", q, state)
        gate = z.reshape(VALUE_HEADS, SIZE)
        gate = sigmoid(gate) if activation == "sigmoid" else gate * sigmoid(gate)
        close(y[row].reshape(VALUE_HEADS, SIZE), normed(out, norm) * gate, 0.01)
        close(after[own], state, 0.01)
    for pools in ((after, pool), (kept, conv)):
        got, want = (exact(x)[np.array([0, 3, 5, 7])] for x in pools)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("step", ["lightning", "gated_delta_net"])
def test_a_row_does_not_depend_on_its_neighbours(step):
    slot, positions = np.array([2, 3, 1]), np.array([5, 6, 7])

    def run(rows):
        where = slot[rows], positions[rows]
        if step == "lightning":
            pool = normal(1, 4, HEADS, SIZE, SIZE, dtype=jnp.float32)
            return lightning_step(normal(5, 3, 4 * WIDTH)[rows], pool, *where)
        pools = normal(1, 4, VALUE_HEADS, SIZE, SIZE, dtype=jnp.float32), normal(2, 4, 3, CHANNELS)
        return delta_step(normal(5, 3, CHANNELS + VALUES + 2 * VALUE_HEADS)[rows], *pools, *where)

    together, alone = run(np.arange(3)), run(np.array([1]))
    np.testing.assert_array_equal(exact(alone[0][0]), exact(together[0][1]))
    for got, want in zip(alone[1:], together[1:]):
        np.testing.assert_array_equal(exact(got[3]), exact(want[3]))


def test_prompts_are_normalised_and_rotated():
    rows = 2 * prompt.ROWS
    projected, positions = normal(0, rows, 4 * WIDTH), np.arange(rows) + 500
    q_norm, k_norm, _ = lightning_weights()
    q, k, v = interpreted(prompt.lightning_rows)(
        projected,
        q_norm,
        k_norm,
        jnp.asarray(positions, jnp.int32),
        heads=HEADS,
        size=SIZE,
        eps=EPS,
        theta=THETA,
    )
    want = exact(projected).reshape(rows, 4, HEADS, SIZE)
    close(q, turned(normed(want[:, 0], exact(q_norm)), positions), 0.01)
    close(k, turned(normed(want[:, 1], exact(k_norm)), positions), 0.01)
    np.testing.assert_array_equal(exact(v), want[:, 2])


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_outputs_of_all_heads_are_normalised_and_gated(rows, monkeypatch):
    monkeypatch.setattr(prompt, "multiprocessors", lambda: 1)  # several rows per program
    out, projected = normal(0, rows, HEADS, SIZE, dtype=jnp.float32), normal(1, rows, 4 * WIDTH)
    o_norm = lightning_weights()[2]
    y = interpreted(prompt.lightning_output)(out, projected, o_norm, eps=EPS, gate=True)
    gate = exact(projected)[:, -WIDTH:]
    close(y, normed(exact(out).reshape(rows, -1), exact(o_norm)) * sigmoid(gate), 0.01)


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_outputs_are_normalised_per_head_and_gated(activation):
    rows = 2 * prompt.ROWS
    out = normal(0, rows, VALUE_HEADS, SIZE, dtype=jnp.float32)
    projected, norm = normal(1, rows, CHANNELS + VALUES + 16), 1 + 0.2 * normal(2, SIZE)
    y = interpreted(prompt.gated_delta_output)(
        out, projected, norm, first=CHANNELS, eps=EPS, activation=activation
    )
    gate = exact(projected)[:, CHANNELS : CHANNELS + VALUES].reshape(y.shape)
    gate = sigmoid(gate) if activation == "sigmoid" else gate * sigmoid(gate)
    close(y, normed(exact(out), exact(norm)) * gate, 0.01)


def test_rows_without_a_token_spoil_no_others():
    rows = prompt.ROWS
    out = normal(0, rows, HEADS, SIZE, dtype=jnp.float32).at[3].set(jnp.nan)
    projected, o_norm = normal(1, rows, 4 * WIDTH).at[3].set(jnp.nan), lightning_weights()[2]
    y = exact(interpreted(prompt.lightning_output)(out, projected, o_norm, eps=EPS, gate=True))
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()
