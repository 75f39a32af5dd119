"""The engine on the Qwen4Exp goldens: chunks, batches, tables on the host, images, cached prefixes."""

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import hybridjax
from hybridjax.checkpoints import load_config
from hybridjax.configs import EngineConfig
from hybridjax.errors import RequestError
from hybridjax.images import expand_placeholders, rope_positions
from hybridjax.images.grid import patch_layout
from hybridjax.serving import Engine, SamplingParams
from hybridjax.serving.image_inputs import ImageInputs
from hybridjax.serving.programs import DeviceState
from hybridjax.serving.runner import ModelRunner
from hybridjax.serving.sizing import ngram_table_placement, pool_sizes

GOLDENS = Path(__file__).parent.parent / "goldens" / "qwen4_exp"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def poison(runner):
    """NaN in every float, and ids that no token has: whatever is read must have been written before."""

    def bad(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full_like(x, jnp.nan) if floating else jnp.full_like(x, 77)

    runner._state = DeviceState(jax.tree.map(bad, runner._state.caches), runner._state.sampler)


def make_engine(name, **fields):
    fields = {"context_length": 512, "max_running_requests": 4, "compilation_cache_dir": "", **fields}
    config = EngineConfig(model_path=str(GOLDENS / name), skip_server_warmup=True, **fields)
    placement = ngram_table_placement(config, load_config(GOLDENS / name))
    model = hybridjax.load_model(GOLDENS / name, dtype="float32", ple_offload=placement)
    runner = ModelRunner(model, config, pool_sizes(config, model))
    poison(runner)
    images = None
    if hasattr(model, "visual"):
        images = ImageInputs.load(GOLDENS / name, model.config, config)
    return Engine.from_parts(config, runner, image_inputs=images), model


def golden(name):
    facts = json.loads((GOLDENS / name / "golden.json").read_text())
    want = load_file(GOLDENS / name / "golden.safetensors")
    return want["input_ids"][0].astype(np.int32), want["logits"][0], facts


@pytest.mark.parametrize(
    ("name", "chunk", "placement"),
    [
        ("text_small", 64, "device"),
        ("text_small", -1, "mmap"),
        ("text_two_ple", 64, "host"),
        ("text_no_ple", -1, "host"),
    ],
)
def test_golden_logits_and_greedy_tokens(name, chunk, placement):
    ids, logits, facts = golden(name)
    engine, _ = make_engine(name, chunked_prefill_size=chunk, ple_offload=placement, max_running_requests=2)
    with engine:
        result = engine.generate(ids, SamplingParams(max_tokens=1, logprobs=20, **GREEDY))[0]
        exact = jax.nn.log_softmax(jnp.asarray(logits[-1]))
        for token, logprob in result.logprobs[0].top:
            assert logprob == pytest.approx(float(exact[token]), abs=1e-4)
        params = SamplingParams(max_tokens=len(facts["greedy"]), **GREEDY)
        prompt = ids[: facts["greedy_prompt_len"]]
        # The second one finds the first one's pages and snapshots.
        for result in (engine.generate(prompt, params)[0], engine.generate(prompt, params)[0]):
            assert list(result.token_ids) == facts["greedy"]
        engine.check_integrity()


@pytest.fixture(scope="module")
def answer():
    """Tokens of plain decoding, one prompt at a time, each computed once."""
    alone, _ = make_engine(
        "text_small", max_running_requests=1, disable_radix_cache=True, num_continuous_decode_steps=1
    )
    answers = {}

    def answer(prompt, tokens):
        key = (prompt.tobytes(), tokens)
        if key not in answers:
            params = SamplingParams(max_tokens=tokens, **GREEDY)
            answers[key] = alone.generate(prompt, params)[0].token_ids
        return answers[key]

    with alone:
        yield answer


@pytest.fixture(scope="module", params=["device", "host"])
def crowded(request):
    """An engine with few slots and pages, so that requests wait and cached prefixes are evicted."""
    engine, _ = make_engine(
        "text_small",
        chunked_prefill_size=64,
        ple_offload=request.param,
        max_total_tokens=1536,
        max_mamba_cache_size=2,
    )
    with engine:
        yield engine


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_tokens_of_plain_decoding(crowded, answer, data):
    base = np.random.default_rng(5).integers(1, 256, 300).astype(np.int32)
    prompts, sizes = [], []
    for i in range(data.draw(st.integers(1, 6))):
        kept = data.draw(st.sampled_from([0, 64, 100, 128, 192]))
        own = data.draw(st.integers(1, 150))
        tail = np.random.default_rng(i % 3).integers(0, 256, own).astype(np.int32)
        prompts.append(np.concatenate([base[:kept], tail]))
        sizes.append(data.draw(st.sampled_from([1, 5, 12])))
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in sizes]
    for prompt, size, result in zip(prompts, sizes, crowded.generate(prompts, params)):
        assert result.token_ids == answer(prompt, size)
    crowded.check_integrity()


@nnx.jit
def forced(model, ids, features, index, rope):
    """Teacher-forced logits of one prompt with images."""
    return model(ids[None], features=features, feature_index=index[None], rope_positions=rope[None])[0]


class TestImages:
    IMAGE, VIDEO, START, END = 290, 291, 292, 293
    compiled: list[tuple[str, bool]] = []

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls):
        # A golden without preprocessor_config.json: the processor's own bounds would enlarge small images.
        fields = {"max_image_area": 16 * 16 * 8, "max_images_per_request": 3}
        cached, model = make_engine("multimodal", chunked_prefill_size=64, **fields)
        cls.compiled.clear()

        def listener(event, seconds, **about):
            if (
                event.endswith("backend_compile_duration")
                and threading.current_thread() is cached._loop._thread
            ):
                cls.compiled.append((about["fun_name"], cached._loop._runner.is_compiling))

        jax.monitoring.register_event_duration_secs_listener(listener)
        with cached:
            yield cached, model
        jax.monitoring.unregister_event_duration_listener(listener)

    def test_the_watchdog_is_told_of_everything_that_is_compiled_while_requests_run(self, engines):
        engine, _ = engines

        class Anything:
            """A grammar that allows every token."""

            ready, is_complete = True, False

            def accept(self, token):
                pass

            def mask(self):
                return np.full(-(-engine.info.vocab_size // 32), 2**32 - 1, np.uint32)

        ended = threading.Event()
        params = SamplingParams(max_tokens=3, repetition_penalty=1.1, **GREEDY)
        entry = engine._entry(
            self.prompt(5, "image"),
            params,
            lambda event: event.finish_reason and ended.set(),
            "r",
            [self.picture(1)],
        )
        entry.request.matcher = Anything()
        engine._loop.add([entry])
        assert ended.wait(300)
        assert [name for name, told in self.compiled if not told] == []
        programs = {name for name, _ in self.compiled}
        assert {"jit(run)", "jit(encode)", "jit(reset_slot)", "jit(write_masks)"} <= programs

    def picture(self, seed, height=24, width=40):
        return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)

    def prompt(self, *parts):
        ids = []
        for part in parts:
            ids += [self.START, self.IMAGE, self.END] if part == "image" else list(range(1, part + 1))
        return np.array(ids, np.int32)

    def expected(self, engine, model, prompt, pictures, count):
        """Greedy tokens by the teacher-forced model, without caches, chunks or batches, and the first
        one's log probability."""
        processor, merge = engine._image_inputs._processor, model.config.vision_config.spatial_merge_size
        done = [processor(picture) for picture in pictures]
        grids = [grid for _, grid in done]
        layout = patch_layout(grids, side=model.config.vision_config.grid_side, merge_size=merge)
        patches = np.concatenate([patches for patches, _ in done])
        features = model.visual(patches, layout.positions, (layout.taps, layout.weights), layout.frame)
        ids = expand_placeholders(prompt, grids, self.IMAGE, merge)
        rope, delta = rope_positions(ids, grids, self.IMAGE, merge)
        placeholder = ids == self.IMAGE
        index = np.where(placeholder, np.cumsum(placeholder) - 1, -1)
        length, total = len(ids), len(ids) + count
        later = np.arange(length, total)
        ids = np.concatenate([ids, np.zeros(count, np.int32)])
        index = np.concatenate([index, np.full(count, -1)])
        rope = np.concatenate([rope, np.repeat(later[:, None] + delta, 3, axis=1)])

        def logits(row):
            return forced(model, jnp.asarray(ids), features, index, rope)[row]

        logprob = float(jax.nn.log_softmax(logits(length - 1)).max())
        for i in range(length, total):
            ids[i] = int(jnp.argmax(logits(i - 1)))
        return tuple(ids[length:].tolist()), logprob

    def test_greedy_tokens_equal_the_teacher_forced_model(self, engines):
        engine, model = engines
        # The first image lies across a chunk border, the second ends the prompt but for one token.
        prompt = self.prompt(50, "image", 30, "image")
        pictures = [self.picture(1), self.picture(2, 40, 16)]
        want, _ = self.expected(engine, model, prompt, pictures, 8)
        params = SamplingParams(max_tokens=8, **GREEDY)
        for _ in range(2):  # the second time from cached prefixes
            result = engine.generate([prompt], params, images=[pictures])[0]
            assert result.token_ids == want
        engine.check_integrity()

    def test_equal_ids_with_other_pixels_share_nothing_that_follows_the_image(self, engines):
        engine, model = engines
        prompt = self.prompt(40, "image", 90)
        params = SamplingParams(max_tokens=4, logprobs=1, **GREEDY)
        seen = []
        for seed in (11, 12, 11):
            pictures = [self.picture(seed)]
            result = engine.generate([prompt], params, images=[pictures])[0]
            tokens, logprob = self.expected(engine, model, prompt, pictures, 4)
            assert result.token_ids == tokens
            assert result.logprobs[0].logprob == pytest.approx(logprob, abs=1e-5)
            seen.append(logprob)
        assert abs(seen[0] - seen[1]) > 1e-3 and seen[0] == seen[2]

    @pytest.mark.parametrize(
        ("parts", "pictures", "message"),
        [
            ((5, "image"), 0, "1 image placeholders and no images"),
            ((5,), 1, "0 image placeholders for 1 images"),
            ((5, "image"), 2, "1 image placeholders for 2 images"),
            (("image",) * 4, 4, "4 images; at most 3"),
        ],
    )
    def test_placeholders_and_images_must_match(self, engines, parts, pictures, message):
        engine, _ = engines
        with pytest.raises(RequestError, match=message):
            engine.generate([self.prompt(*parts)], images=[[self.picture(i) for i in range(pictures)]])

    def test_videos_and_images_for_a_text_model_are_refused(self, engines):
        with pytest.raises(RequestError, match="videos are not supported"):
            engines[0].generate([np.array([1, self.VIDEO])])
        text_only, _ = make_engine("text_small")
        with text_only, pytest.raises(RequestError, match="takes text only"):
            text_only.generate([np.array([1, 2])], images=[[self.picture(1)]])
