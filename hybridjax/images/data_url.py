"""Images in requests: ``data:`` URLs only. Nothing is ever fetched, and sizes are checked before pixels."""

import base64
import binascii
import dataclasses
import hashlib
import io

import numpy as np
from PIL import Image, ImageOps

from hybridjax.errors import RequestError

_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PIECE = 2**18  # characters, a multiple of four
_WANTED = "data:image/png;base64,... (or image/jpeg, image/webp, image/gif)"


@dataclasses.dataclass(frozen=True)
class ImageLimits:
    """What one image of a request may be.

    Attributes:
      max_bytes: of the encoded file, after base64.
      max_pixels: width * height as the file's header says; Pillow's own limit (89 million by default,
        twice that in the end) holds beside it.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000


def load_image(url: object, limits: ImageLimits = ImageLimits()) -> np.ndarray:
    """uint8[height, width, 3]: the pixels of an image given as data URL.

    Raises:
      RequestError: see parse_data_url and decode_image.
    """
    return decode_image(parse_data_url(url, max_bytes=limits.max_bytes), max_pixels=limits.max_pixels)


def parse_data_url(url: object, *, max_bytes: int = ImageLimits.max_bytes) -> bytes:
    """The content of a base64 data URL of an image.

    Args:
      url: ``data:image/<png, jpeg, webp or gif>;base64,<standard base64 without blanks>``.
      max_bytes: most bytes of the content; a longer one is refused before it is decoded.

    Raises:
      RequestError: another kind of URL, not base64, empty or too long.
    """
    if not isinstance(url, str):
        raise _refused(f"the url of an image must be a string, not {type(url).__name__}", "invalid_image_url")
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() != "data":
        kind = f"a URL of scheme {scheme[:20]!r}" if colon else "no URL"
        raise _refused(
            f"the url of an image is {kind}; images are not fetched, only {_WANTED} is supported",
            "unsupported_image_url",
        )
    head, comma, payload = rest.partition(",")
    media, _, encoding = head.partition(";")
    if not comma or encoding.lower() != "base64":
        raise _refused(f"the data URL of an image must be {_WANTED}", "invalid_image_url")
    if media.lower() not in _TYPES:
        raise _refused(
            f"the data URL holds {media[:40]!r}; supported: {', '.join(_TYPES)}", "unsupported_image_type"
        )
    size = len(payload) // 4 * 3 - payload[-2:].count("=")
    if size > max_bytes:
        raise _refused(f"an image has {size} bytes; at most {max_bytes} are allowed", "image_too_large")
    try:
        data = _from_base64(payload)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise _refused(f"the data URL of an image is not base64: {error}", "invalid_image_url") from None
    if not data:
        raise _refused("the data URL of an image is empty", "invalid_image_url")
    return data


def _from_base64(text: str) -> bytes:
    """In pieces: other threads have to wait for each of them."""
    if "=" in text[:-2]:
        raise binascii.Error("padding before its end")
    pieces = (text[at : at + _PIECE].encode("ascii") for at in range(0, len(text), _PIECE))
    return b"".join([base64.b64decode(piece, validate=True) for piece in pieces])


def decode_image(data: bytes, *, max_pixels: int = ImageLimits.max_pixels) -> np.ndarray:
    """uint8[height, width, 3] from a PNG, JPEG, WebP or GIF file (its first frame).

    As transformers' ``load_image``: the EXIF orientation is applied, alpha is dropped. The format is that
    of the content, whatever the URL called it.

    Raises:
      RequestError: none of these formats, damaged or truncated, or more pixels than allowed, which is
        found out before any pixel is decoded.
    """
    # Damaged files make Pillow raise nearly anything.
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _refused(f"an image has more than the {max_pixels} pixels allowed", "image_too_large") from None
    except Exception:
        raise _refused("an image is no readable PNG, JPEG, WebP or GIF file", "invalid_image") from None
    with image:
        width, height = image.size
        if width * height > max_pixels:
            message = f"an image has {width} x {height} pixels; at most {max_pixels} are allowed"
            raise _refused(message, "image_too_large")
        try:
            image.load()
            pixels = np.array(_rgb(ImageOps.exif_transpose(image)))
        except Exception:
            raise _refused("an image cannot be decoded: damaged or truncated", "invalid_image") from None
    if pixels.ndim != 3 or not pixels.size:
        raise _refused("an image has no pixels", "invalid_image")
    return pixels


def content_hash(pixels: np.ndarray) -> bytes:
    """32 bytes, SHA-256 of size and RGB bytes: equal images hash equal, whatever file they came in."""
    digest = hashlib.sha256(np.asarray(pixels.shape, "<u8").tobytes())
    digest.update(np.ascontiguousarray(pixels, np.uint8).data)
    return digest.digest()


def _rgb(image: Image.Image) -> Image.Image:
    if isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # the same colours; straight to RGB, Pillow warns
    return image.convert("RGB")


def _refused(message: str, code: str) -> RequestError:
    return RequestError(message, param="messages", code=code)
