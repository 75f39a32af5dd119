"""What a chat message says: a string, or parts of text and images. Images come as data URLs only."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
from pydantic import PlainValidator

from hybridjax.errors import RequestError
from hybridjax.images import ImageLimits, load_image
from hybridjax.serving.api import EngineInfo, ImageSupport
from hybridjax.serving.prompt_images import SharedImages

MAX_PARTS = 1024
DETAILS = ("auto", "low", "high")


class TextPart(TypedDict):
    """A part of the text."""

    type: Literal["text"]
    text: str


class ImageUrl(TypedDict):
    """``data:image/<png, jpeg, webp or gif>;base64,...``; ``detail`` changes nothing."""

    url: str
    detail: NotRequired[Literal["auto", "low", "high"] | None]


class ImagePart(TypedDict):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


@dataclasses.dataclass(repr=False)
class Picture:
    """An image of a message; its URL, which may be megabytes long, is there until it is taken."""

    url: str

    def take(self) -> str:
        url, self.url = self.url, ""
        return url


Parts = list[str | Picture]


def read_content(value: Any) -> str | Parts:
    """The checked content of a message; raises ValueError without a word of what it says."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise ValueError(f"it must be a string or a list of 1 to {MAX_PARTS} text or image parts")
    return [_part(index, part) for index, part in enumerate(value)]


Content = Annotated[
    str | Parts,
    PlainValidator(read_content, json_schema_input_type=str | list[TextPart | ImagePart]),
]


def _part(index: int, part: Any) -> str | Picture:
    if not isinstance(part, dict):
        raise ValueError(f"part {index} must be an object with a type")
    match part.get("type"):
        case "text":
            if not isinstance(part.get("text"), str):
                raise ValueError(f"part {index} must have a string named 'text'")
            return part["text"]
        case "image_url":
            return _picture(index, part.get("image_url"))
        case kind:
            known = isinstance(kind, str) and re.fullmatch(r"\w{1,32}", kind)
            shown = f"has the type {kind!r}" if known else "has no type"
            raise ValueError(f"part {index} {shown}; only 'text' and 'image_url' parts are supported")


def _picture(index: int, image: Any) -> Picture:
    if isinstance(image, str):
        return Picture(image)
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise ValueError(f"part {index} must have an 'image_url' with a string named 'url'")
    if image.get("detail") not in (None, *DETAILS):
        raise ValueError(f"part {index} has an image whose detail is none of {', '.join(DETAILS)}")
    return Picture(image["url"])


def for_template(content: str | Parts) -> str | list[dict[str, str]]:
    """The content as chat templates know it; of an image, only that there is one."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in content]


def check_images(count: int, info: EngineInfo) -> None:
    """Raises RequestError unless the model takes that many images in a prompt."""
    if count and info.images is None:
        raise RequestError(
            "messages has images; this server's model takes text only",
            param="messages",
            code="images_not_supported",
        )
    if info.images is not None and count > info.images.max_images:
        raise RequestError(
            f"messages has {count} images; at most {info.images.max_images} are allowed",
            param="messages",
            code="too_many_images",
        )


def load_images(
    pictures: Iterable[tuple[str, Picture]], support: ImageSupport, go_on: Callable[[], None]
) -> SharedImages:
    """Decodes images, which takes a processor tens of milliseconds each; takes their URLs away.

    Args:
      pictures: each with the field it stands in.
      support: the limits; that of pixels holds for all images together.
      go_on: called before each image; raises if nobody wants them any more.

    Returns:
      uint8[H, W, 3] each.

    Raises:
      RequestError: something is wrong with one, by its field.
    """
    images: list[np.ndarray] = []
    left = support.max_image_pixels
    for field, picture in pictures:
        go_on()
        try:
            image = load_image(picture.take(), ImageLimits(support.max_image_bytes, left))
        except RequestError as error:
            together = ""
            if error.code == "image_too_large" and images:
                together = f"; the images of a request may have {support.max_image_pixels} pixels together"
            raise RequestError(f"{field}: {error}{together}", param="messages", code=error.code) from None
        left -= image.shape[0] * image.shape[1]
        images.append(image)
    return SharedImages(images)
