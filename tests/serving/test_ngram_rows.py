"""N-gram rows gathered on the host: every row's window, whoever owned the slot before."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.configs import Qwen4ExpConfig
from hybridjax.host_table import HostTable
from hybridjax.ops.ngram_hash import NgramHash
from hybridjax.serving import SamplingParams
from hybridjax.serving.ngram_rows import NgramRows
from hybridjax.serving.plan import DecodeRow, PrefillRow
from hybridjax.serving.request import Request

CONFIG = Qwen4ExpConfig(
    vocab_size=300, eos_token_id=(7,), bos_token_id=None, ngram_vocab_size_base=50, heads_per_ngram=2,
    ple_embed_dim=16,
)  # fmt: skip
HASH = NgramHash.from_config(CONFIG, 0)


@pytest.fixture
def rows():
    values = np.random.default_rng(0).standard_normal((HASH.rows, 4)).astype(np.float32)
    return NgramRows([HASH], [HostTable([values], None, np.float32)], num_slots=4)


def want(rows, ids):
    """The embedding of the last of these ids, computed from the whole sequence."""
    table = rows._layers[0][1]
    return table.gather(HASH.rows_numpy(np.asarray(ids))[-1]).reshape(-1)


def request(ids, slot):
    made = Request("r", np.array(ids, np.int32), SamplingParams(), max_tokens=8, seed=0)
    made.slot = slot
    return made


def prefill(rows, ids, slot, start=0, end=None):
    chunk = PrefillRow(request(ids, slot), start, end or len(ids), (end or len(ids)) == len(ids))
    return np.asarray(rows.prefill([(chunk, 0)], 128)[0]), chunk


def decode(rows, *slots):
    chunks = [DecodeRow(request([1], slot), 9, 1) for slot in slots]
    return np.asarray(rows.decode(chunks, 4)[0]), chunks


def test_prefill_in_chunks_and_decoding_see_the_whole_sequence(rows):
    ids = [5, 7, 9, 7, 7, 11, *range(20, 90), 7, 3]
    for start, end in ((0, 64), (64, len(ids))):
        got, chunk = prefill(rows, ids, 2, start, end)
        for i in range(start, end):
            np.testing.assert_array_equal(got[i - start], want(rows, ids[: i + 1]))
        assert not got[end - start :].any()
    rows.sampled(jnp.array([[40, -1]]), [chunk])
    fed = 40
    for token in (41, 7, 42):
        ids.append(fed)
        got, chunks = decode(rows, 2)
        np.testing.assert_array_equal(got[0], want(rows, ids))
        assert not got[1:].any()
        fed = token
        rows.sampled(jnp.array([[token]]), chunks)


def test_what_a_slots_former_owner_samples_later_is_not_the_new_ones(rows):
    _, chunk = prefill(rows, [1, 2, 3], 1)
    rows.sampled(jnp.array([[50]]), [chunk])
    _, chunk = prefill(rows, [4, 5], 1)  # the slot has gone to somebody else, 50 is still unread
    rows.sampled(jnp.array([[60]]), [chunk])
    got, _ = decode(rows, 1)
    np.testing.assert_array_equal(got[0], want(rows, [4, 5, 60]))


def test_rows_that_emit_nothing_keep_their_context(rows):
    _, chunk = prefill(rows, [*range(64), 1], 3, 0, 64)
    rows.sampled(jnp.array([[-1]]), [chunk])
    got, chunk = prefill(rows, [*range(64), 1], 3, 64)
    np.testing.assert_array_equal(got[0], want(rows, [*range(64), 1]))
    rows.forget()
    rows.sampled(jnp.array([[9]]), [chunk])
    got, _ = decode(rows, 3)
    np.testing.assert_array_equal(got[0], want(rows, [62, 63, 1, 9]))


def test_steps_that_nobody_decodes_after_do_not_pile_up(rows):
    for i in range(100):
        _, chunk = prefill(rows, [i, i + 1], 1 + i % 3)
        rows.sampled(jnp.array([[i]]), [chunk])
    assert len(rows._pending) < 10
    got, _ = decode(rows, 1)
    np.testing.assert_array_equal(got[0], want(rows, [99, 100, 99]))
