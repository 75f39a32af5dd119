"""The vision tower beside the scheduler: what it computes when, for whom, and who fails with it."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from serving_fakes import LIMITS, Recorder, alone, prompt_of, serving, submit_together

from hybridjax.serving.api import SamplingParams
from hybridjax.serving.compiling import Programs
from hybridjax.serving.image_features import ImageFeatures
from hybridjax.serving.plan import NotLaunchedError, PrefillPlan, PrefillRow
from hybridjax.serving.request import make_request

HIDDEN, BLOCK = 3, 4
VISION = types.SimpleNamespace(grid_side=4, spatial_merge_size=2, patch_values=HIDDEN, merge_unit=BLOCK)
CONFIG = types.SimpleNamespace(hidden_size=HIDDEN, vision_config=VISION)


class Processor:
    """Patches whose every value is the image's number; image 13 cannot be processed."""

    def __init__(self):
        self.seen: list[int] = []
        self.count = 16

    def patches(self, pixels):
        self.seen.append(pixels)
        if pixels == 13:
            raise MemoryError("planted")
        return np.full((self.count, HIDDEN), pixels, np.float32)


@pytest.fixture
def tower():
    """ImageFeatures whose features are the image's number doubled; what compiles; traces while it knew."""
    programs, traced = Programs(), []

    class Tower(nnx.Module):
        def __init__(self):
            self.factor = nnx.Param(jnp.float32(2))

        def visual(self, patches, positions, taps, frame):
            traced.append(programs.is_compiling)
            return patches[::BLOCK] * self.factor[...]

    graph, parameters = nnx.split(Tower(), nnx.Param)
    return ImageFeatures(graph, parameters, CONFIG, "float32", programs), programs, traced


def with_images(name, numbers, processor, grid=(1, 4, 4)):
    """A prompt of 128 tokens; 4 rows of each image from position 10 on, 20 tokens apart."""
    request = make_request(name, prompt_of(128), SamplingParams(max_tokens=1), LIMITS, seed=0)
    index = np.full(128, -1, np.int32)
    for i in range(len(numbers)):
        index[10 + 20 * i : 14 + 20 * i] = np.arange(4 * i, 4 * i + 4)
    images = tuple(types.SimpleNamespace(grid=grid, pixels=n, processor=processor) for n in numbers)
    request.images = types.SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        images=images, feature_index=index, rope_positions=np.zeros((128, 3), np.int32), rope_delta=0
    )
    return request


def chunk(request, begin, start=0, end=64):
    return PrefillRow(request, start, end, end == 128), begin


def fields_of(rows=192):
    return {
        "positions": np.zeros(rows, np.int32),
        "rope_positions": np.zeros((rows, 3), np.int32),
        "feature_index": np.zeros(rows, np.int32),
    }


def test_the_watchdog_knows_of_every_program_that_is_compiled(tower):
    features, programs, traced = tower
    processor = Processor()
    for grid, count in (((1, 4, 4), 1), ((1, 4, 4), 1), ((1, 20, 20), 2)):
        processor.count = grid[1] * grid[2]
        features.fill(fields_of(), [chunk(with_images("r", [1], processor, grid), 0)])
        assert traced == [True] * count
        assert not programs.is_compiling


def test_an_image_that_fails_names_its_request_and_costs_the_others_nothing(tower):
    features, _, _ = tower
    processor = Processor()
    good, bad, last = (
        with_images(name, numbers, processor)
        for name, numbers in (("good", [1, 2]), ("bad", [3, 13]), ("last", [4]))
    )
    rows = [chunk(good, 0, 64, 128), chunk(good, 0), chunk(bad, 64), chunk(last, 128)]
    with pytest.raises(NotLaunchedError, match="image 2 of request bad could not be computed") as caught:
        features.fill(fields_of(), rows[1:])
    assert caught.value.requests == (bad,) and caught.value.is_public
    assert isinstance(caught.value.__cause__, MemoryError)
    assert processor.seen == [1, 2, 3, 13]
    fields = fields_of()
    out = np.asarray(features.fill(fields, [rows[1], rows[3]]))
    assert processor.seen == [1, 2, 3, 13, 4], "what was computed for others is kept"
    want = np.zeros((192, HIDDEN), np.float32)
    want[10:14], want[30:34], want[138:142] = 2, 4, 8
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(np.flatnonzero(fields["feature_index"] >= 0), np.flatnonzero(want[:, 0]))
    assert bad.features is None and good.features is not None
    features.fill(fields_of(), [rows[0]])
    assert good.features is None, "the prompt's last chunk needs no more"


def test_only_the_requests_whose_images_failed_end(caplog):
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with serving() as (engine, runner):
        recorder = Recorder()

        def launch(plan):
            for row in plan.rows if isinstance(plan, PrefillPlan) else ():
                if row.request.request_id.startswith("bad"):
                    message = f"image 1 of request {row.request.request_id} could not be computed"
                    raise NotLaunchedError(message, [row.request], is_public=True) from MemoryError("planted")

        requests = [(name, 70, long) for name in ("a", "bad b", "c", "bad d")]
        submit_together(engine, runner, recorder, requests, launch)
        recorder.wait(4)
        for name in ("bad b", "bad d"):
            last = recorder.events[name][-1]
            assert (last.finish_reason, last.error) == (
                "error",
                f"image 1 of request {name} could not be computed",
            )
        assert recorder.tokens("a") == recorder.tokens("c") == alone(engine, prompt_of(70), long)
        assert runner.recoveries == 0
    assert "planted" in caplog.text, "what exactly broke is for the log"
