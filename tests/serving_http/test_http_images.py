"""Images in chats: what reaches the engine, what is refused, and that decoding is in nobody's way."""

import base64
import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from http_fakes import IMAGE, IMAGE_TOKENS, IMAGES, PATIENCE, PLACEHOLDER, FakeEngine, RunningServer
from PIL import Image
from test_http_disconnects import connect, reset

from hybridjax.errors import RequestError
from hybridjax.images import load_image
from hybridjax.serving.http import content as content_module
from hybridjax.serving.http.app import IMAGE_WORKERS
from hybridjax.serving.http.content import Picture, load_images
from hybridjax.text import ChatTemplate

CHAT = "/v1/chat/completions"
PIXELS = [np.random.default_rng(i).integers(0, 256, (5 + i, 9 - i, 3), dtype=np.uint8) for i in range(4)]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(images=IMAGES)
    yield engine
    engine.shutdown()


def url(pixels: np.ndarray, kind: str = "PNG") -> str:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return f"data:image/{kind.lower()};base64," + base64.b64encode(out.getvalue()).decode()


def image(pixels: np.ndarray, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(pixels), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def spell(prompt: Any) -> str:
    return "".join("#" if token == IMAGE else chr(token) for token in prompt)


def same(images: Any, expected: list[np.ndarray]) -> None:
    assert [array.dtype for array in images] == [np.uint8] * len(expected)
    for array, pixels in zip(images, expected, strict=True):
        np.testing.assert_array_equal(array, pixels)


def refusal(reply: httpx.Response, code: str, param: str = "messages") -> str:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert len(error["message"]) < 400
    return error["message"]


def test_the_official_client_sends_images(client: openai.OpenAI, engine: FakeEngine):
    engine.cached_tokens = 2
    done = client.chat.completions.create(
        model="fake",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is"},
                    {"type": "image_url", "image_url": {"url": url(PIXELS[0]), "detail": "low"}},
                ],
            }
        ],
        max_tokens=3,
    )
    assert done.choices[0].message.content == "abc"
    [(prompt, _)] = engine.submitted.values()
    assert spell(prompt) == "[user]what is\n<#>\n[assistant]"
    [images] = engine.images.values()
    same(images, PIXELS[:1])
    # The engine's count, not that of what was sent.
    assert done.usage is not None
    expected = len(prompt) - 1 + IMAGE_TOKENS
    assert (done.usage.prompt_tokens, done.usage.total_tokens) == (expected, expected + 3)


def test_images_keep_their_order_over_messages(http: httpx.Client, engine: FakeEngine):
    bare = {"type": "image_url", "image_url": url(PIXELS[1], "WEBP")}
    messages = [
        user(image(PIXELS[0]), text("a"), bare),
        {"role": "assistant", "content": "b"},
        user(text("c"), image(PIXELS[2], detail="high")),
    ]
    body = {"messages": messages, "max_tokens": 1}
    assert http.post(CHAT, json=body).status_code == 200
    [(prompt, _)] = engine.submitted.values()
    assert spell(prompt) == "[user]<#>\na\n<#>\n[assistant]b\n[user]c\n<#>\n[assistant]"
    same(next(iter(engine.images.values())), PIXELS[:3])


def test_several_choices_share_the_decoded_images(client: openai.OpenAI, engine: FakeEngine):
    stream = client.chat.completions.create(
        model="fake",
        messages=[user(image(PIXELS[0]))],  # pyright: ignore
        n=3,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    last = list(stream)[-1]
    [(prompt, _), *_] = engine.submitted.values()
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt) - 1 + IMAGE_TOKENS, 6)
    first, *others = engine.images.values()
    same(first, PIXELS[:1])
    assert len(others) == 2 and all(images[0] is first[0] for images in others)


def test_the_template_never_sees_a_url(http: httpx.Client, engine: FakeEngine):
    assert engine.tokenizer is not None
    part = text("x") | {"image": "y", "image_url": "z"}
    body = {"messages": [user(image(PIXELS[0]), part), user(text("y"))], "max_tokens": 1}
    assert http.post(CHAT, json=body).status_code == 200
    [rendered] = engine.tokenizer.rendered
    assert rendered == [user({"type": "image"}, text("x")), user(text("y"))]


def one(url: Any) -> list[Any]:
    return [user(text("x"), {"type": "image_url", "image_url": url})]


def pixels(height: int, width: int) -> np.ndarray:
    return np.zeros((height, width, 3), np.uint8)


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
BAD_IMAGES: list[tuple[Any, str, str]] = [
    (one({"url": "https://example.com/x.png"}), "unsupported_image_url", "images are not fetched"),
    (one({"url": "file:///etc/passwd"}), "unsupported_image_url", "scheme 'file'"),
    (one("x.png"), "unsupported_image_url", "no URL"),
    (one(""), "unsupported_image_url", "no URL"),
    (one({"url": "data:image/bmp;base64,AAAA"}), "unsupported_image_type", "'image/bmp'"),
    (one({"url": "data:image/png,AAAA"}), "invalid_image_url", "must be data:image/png;base64"),
    (one({"url": "data:image/png;base64,A"}), "invalid_image_url", "not base64"),
    (one({"url": "data:image/png;base64,"}), "invalid_image_url", "empty"),
    (one({"url": "data:image/png;base64,AAAA"}), "invalid_image", "no readable PNG"),
    (one({"url": url(NOISE)[: 22 + 4000]}), "invalid_image", "damaged or truncated"),
    (one({"url": url(pixels(64, 65))}), "image_too_large", "65 x 64 pixels; at most 4096"),
    (
        one({"url": "data:image/png;base64," + "A" * 4 * 2**15}),
        "image_too_large",
        "98304 bytes; at most 65536",
    ),
    (
        [user(*[image(PIXELS[0])] * 2), user(*[image(PIXELS[0])] * 2)],
        "too_many_images",
        "4 images; at most 3",
    ),
    (one({"url": 5}), "invalid_value", "part 1 must have an 'image_url' with a string named 'url'"),
    (one({}), "invalid_value", "part 1 must have an 'image_url'"),
    (one(None), "invalid_value", "part 1 must have an 'image_url'"),
    (one([url(PIXELS[0])]), "invalid_value", "part 1 must have an 'image_url'"),
    ([user({"type": "image_url"})], "invalid_value", "part 0 must have an 'image_url'"),
    ([user(image(PIXELS[0], detail="huge"))], "invalid_value", "detail is none of auto, low, high"),
    ([user(image(PIXELS[0], detail=[]))], "invalid_value", "detail is none of auto, low, high"),
    (
        [user({"type": "input_audio", "input_audio": {}})],
        "invalid_value",
        "part 0 has the type 'input_audio'",
    ),
    ([user(text("x"), {"type": "video_url"})], "invalid_value", "part 1 has the type 'video_url'"),
    ([user({"type": "file", "file": {}})], "invalid_value", "only 'text' and 'image_url' parts"),
    ([user({"type": 7})], "invalid_value", "part 0 has no type"),
    ([user({"image_url": url(PIXELS[0])})], "invalid_value", "part 0 has no type"),
    ([user(text("x " + PLACEHOLDER))], "image_placeholder_mismatch", "1 image placeholders for 0 images"),
    (
        [user(text(PLACEHOLDER), image(PIXELS[0]))],
        "image_placeholder_mismatch",
        "2 image placeholders for 1 images",
    ),
]


@pytest.mark.parametrize(("messages", "code", "message"), BAD_IMAGES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_an_image_is_said(
    http: httpx.Client, engine: FakeEngine, messages: Any, code: str, message: str, stream: bool
):
    reply = http.post(CHAT, json={"messages": messages, "stream": stream})
    field = "messages[0].content" if code == "invalid_value" else "messages"
    assert message in refusal(reply, code, field)
    assert engine.submitted == {}
    assert http.get("/health").status_code == 200


def test_the_image_at_fault_is_named(http: httpx.Client):
    messages = [user(image(PIXELS[0])), user(text("x"), image(pixels(1, 5000)))]
    message = refusal(http.post(CHAT, json={"messages": messages}), "image_too_large")
    assert message == (
        "messages[1].content[1]: an image has 5000 x 1 pixels; at most 4051 are allowed; "
        "the images of a request may have 4096 pixels together"
    )


def test_pixels_are_bounded_over_all_images():
    def load(*sizes: tuple[int, int]) -> list[np.ndarray]:
        pictures = [(f"image {i}", Picture(url(pixels(*size)))) for i, size in enumerate(sizes)]
        return load_images(pictures, IMAGES, lambda: None)

    assert [image.shape[:2] for image in load((32, 64), (32, 64))] == [(32, 64), (32, 64)]
    with pytest.raises(RequestError, match="image 2: .* may have 4096 pixels together"):
        load((32, 64), (32, 64), (1, 1))


def test_placeholders_as_text_are_refused_elsewhere_too(http: httpx.Client):
    for path, body in (
        ("/v1/completions", {"prompt": PLACEHOLDER}),
        ("/v1/completions", {"prompt": [IMAGE]}),
        ("/generate", {"text": PLACEHOLDER}),
        (CHAT, {"messages": [{"role": "system", "content": PLACEHOLDER}]}),
    ):
        refusal(http.post(path, json=body), "image_placeholder_mismatch")


def test_a_model_without_images_says_so(serve: Any, engine: FakeEngine):
    plain = FakeEngine()
    server = RunningServer(plain)
    reply = httpx.post(server.url + CHAT, json={"messages": [user(image(PIXELS[0]))]})
    assert "takes text only" in refusal(reply, "images_not_supported")
    # There, the placeholder is text like any other.
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert reply.status_code == 200
    assert httpx.get(server.url + "/model_info").json()["has_image_understanding"] is False
    server.settle()
    server.stop()
    plain.shutdown()
    assert httpx.get(serve().url + "/model_info").json()["has_image_understanding"] is True


def test_a_template_without_images_says_so(serve: Any, engine: FakeEngine):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", name="test")
    assert engine.tokenizer is not None
    engine.tokenizer.render_chat = template.render
    server = serve()
    reply = httpx.post(server.url + CHAT, json={"messages": [user(image(PIXELS[0]))]})
    assert "chat template does not know" in refusal(reply, "images_not_supported")
    body = {"messages": [user(text("a"), text("b"))], "max_tokens": 1}
    assert httpx.post(server.url + CHAT, json=body).status_code == 200
    [(prompt, _)] = engine.submitted.values()
    assert spell(prompt) == "a\nb"


def test_images_count_as_part_of_the_body(serve: Any, engine: FakeEngine):
    body = json.dumps({"messages": [user(image(NOISE))], "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    server = serve(max_request_bytes=len(body) - 1)
    reply = httpx.post(server.url + CHAT, content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert engine.submitted == {}
    server = serve(max_request_bytes=len(body))
    assert httpx.post(server.url + CHAT, content=body, headers=headers).status_code == 200


class SlowDecoding:
    """Decodes as always, but only once ``go`` is set; notes who is at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.go = threading.Event()
        self.changed = threading.Condition()
        self.active = self.most = self.started = 0
        monkeypatch.setattr(content_module, "load_image", self)

    def __call__(self, *args: Any) -> np.ndarray:
        with self.changed:
            self.active += 1
            self.started += 1
            self.most = max(self.most, self.active)
            self.changed.notify_all()
        assert self.go.wait(PATIENCE)
        with self.changed:
            self.active -= 1
        return load_image(*args)

    def wait_for(self, active: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.active == active, PATIENCE)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_decoding_blocks_nobody_and_is_bounded(
    server: RunningServer, http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    slow = SlowDecoding(monkeypatch)
    body = {"messages": [user(image(PIXELS[0]))], "max_tokens": 1}
    replies: list[int] = []

    def post() -> None:
        replies.append(httpx.post(server.url + CHAT, json=body, timeout=PATIENCE).status_code)

    # More than there are threads for requests of all kinds.
    threads = [threading.Thread(target=post) for _ in range(50)]
    for thread in threads:
        thread.start()
    slow.wait_for(IMAGE_WORKERS)
    wait_until(lambda: len(server.lifecycle.running) == len(threads))
    assert http.get("/health").status_code == 200
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    chat = {"messages": [user(text("x"))], "max_tokens": 2}
    assert http.post(CHAT, json=chat).status_code == 200
    assert (slow.started, len(engine.submitted)) == (IMAGE_WORKERS, 2)
    slow.go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert replies == [200] * len(threads)
    assert slow.most == IMAGE_WORKERS


def test_a_client_that_leaves_while_its_images_are_decoded_leaves_nothing_behind(
    server: RunningServer, http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    slow = SlowDecoding(monkeypatch)
    messages = [user(image(PIXELS[0]), image(PIXELS[1]))]
    sockets = [connect(server, path=CHAT, messages=messages, n=2) for _ in range(IMAGE_WORKERS + 2)]
    slow.wait_for(IMAGE_WORKERS)
    wait_until(lambda: len(server.lifecycle.running) == len(sockets))
    generations = list(server.lifecycle.running)
    for sock in sockets:
        reset(sock)
    wait_until(lambda: all(generation.is_closed for generation in generations))
    slow.go.set()
    server.settle()
    # Neither the second images nor those of the requests that had to wait.
    assert (slow.started, engine.submitted, dict(engine.aborts)) == (IMAGE_WORKERS, {}, {})
    reply = http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert reply.status_code == 200


def test_urls_and_pixels_are_dropped_once_the_engine_has_them(
    server: RunningServer, http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    taken: list[content_module.Picture] = []
    take = content_module.Picture.take
    monkeypatch.setattr(
        content_module.Picture, "take", lambda picture: (taken.append(picture), take(picture))[1]
    )
    body = {"messages": [user(image(PIXELS[0]))], "max_tokens": 1}
    assert http.post(CHAT, json=body).status_code == 200
    assert [picture.url for picture in taken] == [""]


@pytest.mark.parametrize(
    "messages",
    [
        [user(image(NOISE))],
        [user({"type": "image_url", "image_url": url(NOISE)})],
        [user(image(NOISE), {"type": "video_url"})],
        [user(image(NOISE)), user(image(NOISE), image(pixels(1, 5000)))],
        [user(image(NOISE)) | {"tool_calls": [{}]}],
        [user(image(NOISE)) | {"name": 7}],
        [{"content": [image(NOISE)]}],
        [{"role": "user", "content": url(NOISE), "tool_calls": [{}]}],
        [{"role": url(NOISE), "content": "x"}],
        [url(NOISE)],
        url(NOISE),
        {"x": url(NOISE)},
        [user(url(NOISE))],  # pyright: ignore
        [user({"type": url(NOISE)})],
        one({"url": url(NOISE)[: 22 + 4000]}),
        one({"url": " " + url(NOISE)}),
        one({"url": url(NOISE).replace(",", ",*")}),
        one({"url": url(NOISE).replace(";base64", "")}),
        one({"url": url(NOISE).partition(",")[2]}),
        one({"x": url(NOISE)}),
        one({"detail": url(NOISE), "url": ""}),
    ],
)
def test_images_are_in_no_log_and_no_error(serve: Any, caplog: pytest.LogCaptureFixture, messages: Any):
    caplog.set_level(logging.DEBUG)
    server = serve(log_requests=True)
    reply = httpx.post(server.url + CHAT, json={"messages": messages, "max_tokens": 1})
    assert reply.status_code in (200, 400)
    server.settle()
    written = caplog.text + reply.text
    payload = url(NOISE).partition(",")[2]
    for start in (0, 40, 400, len(payload) - 12):
        assert payload[start : start + 12] not in written


def test_an_image_that_breaks_the_decoder_is_the_servers_fault_but_stays_unseen(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(given: str, limits: Any) -> Any:
        raise OSError("disk")

    monkeypatch.setattr(content_module, "load_image", broken)
    reply = httpx.post(server.url + CHAT, json={"messages": [user(image(NOISE))]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "OSError" in caplog.text and url(NOISE)[30:60] not in caplog.text


def test_the_parts_are_documented(http: httpx.Client):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    kinds = schemas["Message"]["properties"]["content"]["anyOf"]
    assert [kind["type"] for kind in kinds] == ["string", "array"]
    assert schemas["ImagePart"]["properties"]["type"]["const"] == "image_url"
    assert schemas["ImageUrl"]["required"] == ["url"]
