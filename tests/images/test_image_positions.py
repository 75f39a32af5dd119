"""Placeholders and rotary positions, against the reference's answers and plain loops."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hybridjax.errors import RequestError
from hybridjax.images import cache_ids, content_hash, expand_placeholders, rope_positions

GOLDEN = load_file(Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "images.safetensors")
IMAGE = 290


@pytest.mark.parametrize("case", sorted({name.split(".")[1] for name in GOLDEN if name.startswith("rope.")}))
def test_positions_are_those_of_the_reference(case):
    golden = {name.split(".")[2]: value for name, value in GOLDEN.items() if name.startswith(f"rope.{case}.")}
    grids = [tuple(map(int, grid)) for grid in golden["grids"]]
    positions, delta = rope_positions(golden["ids"], grids, IMAGE, 2)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, golden["positions"])
    assert delta == golden["delta"][0]


def by_loops(parts):
    out, at = [], 0
    for part in parts:
        if isinstance(part, int):
            out += [(at + i,) * 3 for i in range(part)]
            at += part
        else:
            frames, rows, columns = part
            out += [
                (at + t, at + y, at + x) for t in range(frames) for y in range(rows) for x in range(columns)
            ]
            at += max(rows, columns)
    return out


PARTS = st.lists(
    st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))),
    min_size=1,
    max_size=7,
)


@given(PARTS, st.integers(1, 3))
def test_any_layout_expands_and_counts_as_plain_loops_do(parts, merge):
    grids = [(p[0], p[1] * merge, p[2] * merge) for p in parts if not isinstance(p, int)]
    prompt = [i for p in parts for i in (range(p) if isinstance(p, int) else [IMAGE])]
    ids = expand_placeholders(prompt, grids, IMAGE, merge)
    positions, delta = rope_positions(ids, grids, IMAGE, merge)
    want = by_loops(parts)
    np.testing.assert_array_equal(positions, want)
    assert delta == max(map(max, want)) + 1 - len(want)


def test_plain_text_has_plain_positions():
    positions, delta = rope_positions([5, 6, 7], [], IMAGE, 2)
    assert positions.tolist() == [[0] * 3, [1] * 3, [2] * 3] and delta == 0


@pytest.mark.parametrize(
    "ids, grids, message",
    [
        ([1, IMAGE, 2], [], "1 image placeholders; its 0 images take 0"),
        ([1, 2], [(1, 2, 2)], "0 image placeholders; its 1 images take 1"),
        ([IMAGE] * 3, [(1, 4, 4)], "3 image placeholders; its 1 images take 4"),
        ([IMAGE, IMAGE, 1, IMAGE, IMAGE], [(1, 4, 4)], "image 0 takes 4 placeholders; the prompt has 2 in a"),
        ([IMAGE, 1, IMAGE, IMAGE, IMAGE], [(1, 2, 4), (1, 2, 4)], "image 0 takes 2 .* has 1 in a row"),
    ],
)
def test_placeholders_that_do_not_match_are_refused(ids, grids, message):
    with pytest.raises(RequestError, match=message) as refused:
        rope_positions(ids, grids, IMAGE, 2)
    assert (refused.value.param, refused.value.code) == ("messages", "image_placeholder_mismatch")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_placeholders_as_images(count):
    with pytest.raises(RequestError, match=f"has {count} image placeholders for 2 images"):
        expand_placeholders([1, *[IMAGE, 2] * count], [(1, 2, 2)] * 2, IMAGE, 2)


def test_cache_ids_tell_images_apart_and_are_no_tokens():
    first, second = (content_hash(np.full((2, 3, 3), value, np.uint8)) for value in (1, 2))
    one, other = cache_ids(first, 20), cache_ids(second, 20)
    assert one.dtype == np.int64 and one.shape == (20,)
    assert (one < 0).all() and len(set(one.tolist())) == 20
    assert not (one == other).any()
    np.testing.assert_array_equal(cache_ids(first, 5), one[:5])
