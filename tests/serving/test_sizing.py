"""Pool sizes and buckets follow flags, model and memory, or say why they cannot."""

import jax.numpy as jnp
import pytest
from flax import nnx

from hybridjax.configs import EngineConfig, MiniCPMSALAConfig, SparseConfig
from hybridjax.errors import ConfigError
from hybridjax.models.minicpm_sala import MiniCPMSALA
from hybridjax.serving.sizing import Bucket, buckets, pool_sizes, prefill_tiles

CONFIG = MiniCPMSALAConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    lightning_nh=2,
    lightning_nkv=2,
    lightning_head_dim=16,
    dim_model_base=32,
    max_position_embeddings=4096,
    eos_token_id=(2,),
    mixer_types=("minicpm4", "lightning-attn", "minicpm4"),
    sparse_config=SparseConfig(topk=3, window_size=128, dense_len=256),
)


@pytest.fixture(scope="module")
def model():
    return MiniCPMSALA(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


# Two sparse layers: 64 keys and values, 4 compressed and 1 coarse key of 2 heads x 8, bfloat16.
PAGE_BYTES = 2 * (2 * 64 + 5) * 2 * 8 * 2
# One linear layer's float32 state, 9 bytes of sampling state per vocabulary entry, and a mask of 4 words.
SLOT_BYTES = 2 * 16 * 16 * 4 + 9 * 100 + 16


def test_bytes_per_token_and_request_are_those_of_the_arrays(model):
    sizes = pool_sizes(EngineConfig(max_running_requests=4), model, free_bytes=2**24)
    assert sizes.bytes_per_token == PAGE_BYTES / 64
    assert sizes.bytes_per_request == SLOT_BYTES


def test_released_model_needs_what_the_specification_says():
    abstract = nnx.eval_shape(lambda: MiniCPMSALA(MiniCPMSALAConfig(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    size = abstract.state_size()
    assert size.per_slot == 24 * 32 * 128 * 128 * 4 == 50_331_648
    assert size.per_page == 64 * (8192 + 320)


def test_flags_decide_the_pools(model):
    flags = EngineConfig(
        max_running_requests=4, max_total_tokens=1000, context_length=512, max_mamba_cache_size=7
    )
    sizes = pool_sizes(flags, model, free_bytes=2**24)
    assert sizes.num_slots == 1 + 4 + 7
    assert sizes.num_pages == 1 + 16  # 1000 tokens in whole pages
    assert (sizes.max_running_requests, sizes.max_total_tokens) == (4, 1024)
    assert sizes.context_length == 512


def test_memory_decides_what_flags_leave_open(model):
    free = 100 * PAGE_BYTES + 5 * SLOT_BYTES
    flags = EngineConfig(max_running_requests=4, disable_radix_cache=True)
    sizes = pool_sizes(flags, model, free_bytes=free)
    assert (sizes.num_pages, sizes.num_slots) == (100, 5)
    assert sizes.context_length == 4096


def test_a_small_pool_bounds_the_context(model):
    sizes = pool_sizes(EngineConfig(max_running_requests=1, max_total_tokens=640), model, 2**24)
    assert sizes.context_length == 640


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"context_length": 5000}, "context_length is 5000; the model was built for at most 4096"),
        ({"page_size": 32}, "page_size is 32; this model's pages hold 64 tokens"),
        ({"max_total_tokens": 10**6}, "Lower max_running_requests"),
        ({"max_running_requests": 10**5}, "Lower max_running_requests"),
    ],
)
def test_what_cannot_be_is_refused(model, flags, message):
    with pytest.raises(ConfigError, match=message):
        pool_sizes(EngineConfig(**flags), model, free_bytes=2**22)


def test_buckets_cover_every_step_and_are_few(model):
    flags = EngineConfig(max_running_requests=16, chunked_prefill_size=2048)
    sizes = pool_sizes(flags, model, free_bytes=2**27)
    made = buckets(flags, sizes)
    assert prefill_tiles(flags, sizes) == 32
    assert Bucket("prefill", 32, 64) in made
    assert Bucket("decode", 16, 64, 4) in made
    assert {b.rows for b in made if b.mode == "decode"} == {1, 4, 16}
    assert {b.pages for b in made} == {16, 64}
    assert len(made) == 12


def test_a_whole_prompt_chunk_is_as_long_as_the_context(model):
    flags = EngineConfig(max_running_requests=1, chunked_prefill_size=-1, context_length=1000)
    assert prefill_tiles(flags, pool_sizes(flags, model, 2**24)) == 16
