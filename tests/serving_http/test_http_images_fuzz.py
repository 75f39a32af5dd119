"""Random parts of messages: the server may refuse them, it may never fail on them."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from http_fakes import IMAGE, IMAGES, PLACEHOLDER, fuzzed_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image


def encoded(height: int, width: int, kind: str) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


FILES = [encoded(3, 5, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")] + [encoded(64, 65, "PNG")]

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just(PLACEHOLDER)
keys = st.sampled_from(["type", "text", "image_url", "image", "url", "detail"]) | st.text(max_size=3)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def urls(draw: st.DrawFn) -> str:
    data = bytearray(draw(st.sampled_from(FILES)))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), max_size=2)):
        data[place % len(data)] = value
    heads = ["data:image/png;base64,"] * 9 + ["data:image/png,", "data:text/plain;base64,", "https://", ""]
    url = draw(st.sampled_from(heads)) + base64.b64encode(data).decode()
    return url[: len(url) - draw(st.sampled_from([0, 0, 0, 0, 1, 40]))]


values = {
    "type": st.sampled_from(["image_url"] * 3 + ["text", "image", "video_url", "file"]) | anything,
    "image_url": st.fixed_dictionaries(
        {"url": urls()}, optional={"detail": st.sampled_from(["auto", "low", "x"]) | scalars}
    )
    | urls()
    | anything,
    "text": st.text(max_size=5) | st.just(PLACEHOLDER) | anything,
}
good = st.fixed_dictionaries(
    {"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": urls()})}
) | st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)})
parts = good | good | st.fixed_dictionaries({}, optional=values) | anything
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.lists(parts, max_size=3)}
    ),
    min_size=1,
    max_size=2,
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with fuzzed_server(context_length=128, images=IMAGES) as (engine, client):
        yield client
    pictures = [len(images) for images in engine.images.values()]
    assert sum(pictures) > 20
    for images, (prompt, _) in zip(engine.images.values(), engine.submitted.values(), strict=True):
        assert list(prompt).count(IMAGE) == len(images)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=messages, n=st.integers(1, 2), stream=st.booleans())
def test_random_parts_never_fail_the_server(http: httpx.Client, messages: Any, n: int, stream: bool):
    reply = http.post("/v1/chat/completions", json={"messages": messages, "n": n, "stream": stream})
    assert reply.status_code in (200, 400), (reply.status_code, reply.text)
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error" and error["code"] != "internal_error"
        assert error["param"] and len(error["message"]) < 600
