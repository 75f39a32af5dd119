"""The engine with the real tokenizer code on a fake device, and loaded from a checkpoint directory."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from serving_fakes import FakeRunner

from hybridjax.checkpoints import load_model
from hybridjax.configs import EngineConfig
from hybridjax.errors import CheckpointError, ConfigError, RequestError
from hybridjax.serving import Engine, SamplingParams
from hybridjax.text import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "goldens" / "minicpm_sala" / "dense"


@pytest.fixture
def byte_tokenizer(tmp_path):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


def test_text_is_what_the_tokenizer_decodes(byte_tokenizer):
    runner = FakeRunner(vocab_size=256)
    with Engine.from_parts(EngineConfig(), runner, byte_tokenizer) as engine:
        params = SamplingParams(temperature=0, max_tokens=200)
        prompts = ["aé€😀", "second prompt"]
        for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
            assert list(result.prompt_token_ids) == byte_tokenizer.encode(prompt)
            assert len(result.token_ids) == 200
            assert result.text == byte_tokenizer.decode(list(result.token_ids))
            stop = result.text[100:103]
            cut = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=200, stop=stop))[0]
            assert cut.text == result.text[: result.text.index(stop)]
        with pytest.raises(RequestError):
            engine.generate("\ud800", params)


def test_an_engine_loaded_from_a_directory_generates_what_the_model_says():
    engine = Engine(
        str(GOLDEN),
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        compilation_cache_dir="",
        context_length=128,
        max_running_requests=1,
    )
    with engine:
        assert engine.info.model_name == "dense"
        assert engine.info.context_length == 128
        assert engine._limits.eos_tokens == (2, 96)
        prompt = np.random.default_rng(0).integers(0, engine.info.vocab_size, 70).tolist()
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        result = engine.generate(prompt, params)[0]
        engine.check_integrity()
    tokens = [*prompt, *result.token_ids]
    whole = nnx.jit(lambda model, ids: model(ids))
    logits = whole(load_model(GOLDEN, "float32"), jnp.array([tokens[:-1]]))[0, len(prompt) - 1 :]
    assert list(result.token_ids) == jnp.argmax(logits, axis=-1).tolist()
    assert result.logprobs is not None
    for token in result.logprobs:
        assert token.top[0] == (token.token_id, token.logprob)
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert [token.token_id for token in result.prompt_logprobs[1:]] == prompt[1:]


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no-such-model"):
        Engine("no-such-model")
    with pytest.raises(CheckpointError, match="tokenizer"):
        Engine(str(GOLDEN), tokenizer_path=str(tmp_path))
    with pytest.raises(ConfigError, match="implementation names op 'foo'"):
        Engine(str(GOLDEN), implementation="foo=bar", skip_server_warmup=True)
    with pytest.raises(ConfigError, match="context_length"):
        Engine(str(GOLDEN), skip_tokenizer_init=True, context_length=10**6, compilation_cache_dir="")


def test_a_checkpoint_without_a_tokenizer_serves_token_ids():
    with Engine(
        str(GOLDEN),
        context_length=128,
        max_running_requests=1,
        compilation_cache_dir="",
        skip_server_warmup=True,
    ) as engine:
        assert engine.tokenizer is None
        result = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0]
        assert len(result.token_ids) == 3
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate("text")


def test_a_checkpoint_under_the_call_rule_is_not_served(tmp_path):
    config = json.loads((GOLDEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dense_switch": "call"}))
    with pytest.raises(ConfigError, match="dense_switch is 'call'; it must be 'position' for serving"):
        Engine(str(tmp_path), skip_server_warmup=True)


def test_an_extreme_but_legal_request_disturbs_nobody(byte_tokenizer):
    """On the real runner: settings at the ends of their ranges beside a plain request."""
    fields = {"context_length": 128, "max_running_requests": 4, "compilation_cache_dir": ""}
    extremes = (
        {"top_k": 2**31 - 1, "temperature": 100.0},
        {"seed": -(2**63), "temperature": 1e-300, "repetition_penalty": 0.01},
        {"seed": 2**63 - 1, "min_p": 1.0, "top_p": 0.0, "temperature": 1.0},
        {"min_tokens": 4, "repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {96: 100.0, 0: -100.0}, "logprobs": 20},
    )
    with Engine(str(GOLDEN), skip_server_warmup=True, **fields) as engine:
        plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        alone = engine.generate([[1, 2, 3]], plain)[0].token_ids
        for extreme in extremes:
            params = [SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **extreme}), plain]
            odd, same = engine.generate([[4, 5], [1, 2, 3]], params)
            assert (odd.finish_reason, len(odd.token_ids)) == ("length", 4)
            assert same.token_ids == alone
        with pytest.raises(RequestError, match="min_tokens"):
            engine.generate([4, 5], SamplingParams(max_tokens=None, min_tokens=2**31 - 1))
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.tokenizer = byte_tokenizer
            engine.generate("")
