"""Data URLs: what is taken, what is refused and why, and that nothing else ever comes out."""

import base64
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from hybridjax.errors import RequestError
from hybridjax.images import ImageLimits, content_hash, data_url, decode_image, load_image, parse_data_url

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)


def file(pixels=PIXELS, kind="PNG", mode=None, **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels, mode)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def url(data, media="image/png"):
    return f"data:{media};base64," + base64.b64encode(data).decode()


def refused(call, code):
    with pytest.raises(RequestError) as error:
        call()
    assert (error.value.param, error.value.code) == ("messages", code)
    return str(error.value)


@pytest.mark.parametrize(
    "kind, media, options",
    [("PNG", "image/png", {}), ("WEBP", "image/webp", {"lossless": True}), ("PNG", "IMAGE/JPG", {})],
)
def test_pixels_come_out_as_they_went_in(kind, media, options):
    np.testing.assert_array_equal(load_image(url(file(kind=kind, **options), media)), PIXELS)


def test_jpeg_is_read():
    smooth = np.broadcast_to(np.arange(0, 240, 10, dtype=np.uint8)[None, :, None], (16, 24, 3))
    got = load_image(url(file(smooth, "JPEG", quality=95), "image/jpeg"))
    assert np.abs(got.astype(int) - smooth).max() < 8


def test_the_first_frame_of_an_animation_is_read():
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue")]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True})):
        data = file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(decode_image(data), np.array(frames[0]))


def test_other_modes_become_rgb_as_the_reference_makes_them():
    rng = np.random.default_rng(1)
    alpha = rng.integers(0, 256, (5, 4, 4), dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(file(alpha)), alpha[:, :, :3])  # alpha is dropped
    grey = rng.integers(0, 256, (5, 4), dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(file(grey)), np.repeat(grey[:, :, None], 3, axis=2))
    palette = Image.fromarray(PIXELS).quantize(8)
    for transparency in (2, bytes([0, 9, 255])):
        data = file(palette, transparency=transparency)
        np.testing.assert_array_equal(decode_image(data), np.array(palette.convert("RGB")))


@pytest.mark.parametrize(
    "orientation, turn",
    [
        (1, lambda x: x),
        (2, lambda x: x[:, ::-1]),
        (3, lambda x: x[::-1, ::-1]),
        (4, lambda x: x[::-1]),
        (5, lambda x: x.swapaxes(0, 1)),
        (6, lambda x: np.rot90(x, -1)),
        (7, lambda x: x[::-1, ::-1].swapaxes(0, 1)),
        (8, lambda x: np.rot90(x, 1)),
    ],
)
def test_the_orientation_of_a_photograph_is_applied(orientation, turn):
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode_image(file(exif=exif)), turn(PIXELS))


@pytest.mark.parametrize("text", ["https://example.com/a.png", "http://x/y", "file:///etc/passwd", "ftp://a"])
def test_nothing_is_fetched(text):
    message = refused(lambda: parse_data_url(text), "unsupported_image_url")
    assert text.split(":")[0] in message and "not fetched" in message and "example.com" not in message


def test_a_path_is_no_url():
    assert "no URL" in refused(lambda: parse_data_url("/etc/passwd"), "unsupported_image_url")


@pytest.mark.parametrize(
    "text, code, words",
    [
        (7, "invalid_image_url", "a string, not int"),
        (None, "invalid_image_url", "a string, not NoneType"),
        ("data:image/png,abc", "invalid_image_url", "base64"),
        ("data:image/png;base64", "invalid_image_url", "base64"),
        ("data:image/png;charset=utf-8;base64,AAAA", "invalid_image_url", "must be data:image/png;base64"),
        ("data:image/svg+xml;base64,AAAA", "unsupported_image_type", "image/svg"),
        ("data:;base64,AAAA", "unsupported_image_type", "supported"),
        ("data:image/png;base64,", "invalid_image_url", "empty"),
        ("data:image/png;base64,AAA", "invalid_image_url", "not base64"),
        ("data:image/png;base64,AA AA", "invalid_image_url", "not base64"),
        ("data:image/png;base64,AA-_", "invalid_image_url", "not base64"),
        ("data:image/png;base64,AAAé", "invalid_image_url", "not base64"),
    ],
)
def test_urls_are_read_strictly(text, code, words):
    assert words in refused(lambda: parse_data_url(text), code)


@pytest.mark.parametrize("size", [1, 2**18, 2**18 - 1, 3 * 2**16 * 2 + 1, 3 * 2**16 * 2 + 2])
def test_long_contents_come_out_whole(size):
    data = np.random.default_rng(size).bytes(size)
    assert parse_data_url(url(data)) == data


@pytest.mark.parametrize("place", [2**18 - 2, 2**18 - 1, 2**18, 2**18 + 1])
@pytest.mark.parametrize("wrong", ["=", "==", "-", " ", "é"])
def test_long_contents_are_read_strictly_to_the_end(place, wrong):
    text = "A" * place + wrong
    text += "A" * (2**18 + 2**17 - len(text))
    refused(lambda: parse_data_url("data:image/png;base64," + text), "invalid_image_url")


@given(st.text("Aé=+-", max_size=12), st.integers(1, 3))
def test_pieces_are_read_as_the_whole_would_be(text, pieces):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_url, "_PIECE", 4 * pieces)
        try:
            expected = base64.b64decode(text.encode("ascii"), validate=True)
        except ValueError:
            expected = b""
        if expected:
            assert parse_data_url("data:image/png;base64," + text) == expected
        else:
            refused(lambda: parse_data_url("data:image/png;base64," + text), "invalid_image_url")


def test_bytes_are_limited_to_the_byte():
    for size in range(1, 9):
        text = url(bytes(size))
        assert parse_data_url(text, max_bytes=size) == bytes(size)
        message = refused(
            lambda text=text, size=size: parse_data_url(text, max_bytes=size - 1), "image_too_large"
        )
        assert f"{size} bytes" in message and f"most {size - 1}" in message


def bomb(width, height):
    """A PNG that announces many pixels and has hardly any content."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [7000, 12000, 50000])
def test_pixels_are_counted_before_they_are_decoded(side):
    tracemalloc.start()
    message = refused(lambda: decode_image(bomb(side, side)), "image_too_large")
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    assert "40000000" in message


def test_pixels_are_limited_to_the_pixel():
    limits = ImageLimits(max_pixels=16 * 24)
    assert load_image(url(file()), limits).shape == (16, 24, 3)
    text = url(file(np.zeros((5, 77, 3), np.uint8)))
    assert "77 x 5 pixels" in refused(lambda: load_image(text, limits), "image_too_large")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated_files_are_refused(kind):
    data = file(kind=kind)
    for end in (1, 10, 40, len(data) // 2, len(data) * 3 // 4):
        refused(lambda end=end: decode_image(data[:end]), "invalid_image")


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused_whatever_they_are_called(kind):
    message = refused(lambda: load_image(url(file(kind=kind))), "invalid_image")
    assert "PNG, JPEG, WebP or GIF" in message


@given(st.binary(max_size=200))
@example(b"\x89PNG\r\n\x1a\n")
def test_random_bytes_are_refused(data):
    with pytest.raises(RequestError):
        decode_image(data)


FILES = [file(kind=kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]


@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8))
def test_damaged_files_give_pixels_or_a_refusal(data, changes):
    data = bytearray(data)
    for place, value in changes:
        data[place % len(data)] = value
    try:
        pixels = decode_image(bytes(data))
    except RequestError as error:
        assert error.param == "messages"
    else:
        assert pixels.dtype == np.uint8 and pixels.shape[2] == 3


@given(st.text(max_size=40), st.sampled_from(["", "data:", "data:image/png;base64,", "data:image/png;"]))
def test_random_urls_are_refused(text, start):
    with pytest.raises(RequestError):
        load_image(start + text)


def test_equal_pixels_hash_equal_whatever_the_file():
    first = content_hash(load_image(url(file())))
    assert first == content_hash(load_image(url(file(kind="WEBP", lossless=True)))) and len(first) == 32
    assert first != content_hash(PIXELS.reshape(24, 16, 3))
    other = PIXELS.copy()
    other[0, 0, 0] ^= 1
    assert first != content_hash(other)
