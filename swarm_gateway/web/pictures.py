"""Pictures in requests: their bytes, and what a model's processor makes of them."""

from __future__ import annotations

import base64
import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swarm_gateway.limits.admission import ApiError
from swarm_models.checkpoints.default_model import locate
from swarm_protocol.failures import any_error_as, logged_errors, one_line

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

_logger = logging.getLogger(__name__)
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,(.*)", re.IGNORECASE | re.DOTALL)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MOST_PIXELS = 40_000_000  # of one request: 120 MB as RGB
MOST_PICTURES = 32  # of one request


class PictureReader:
    """The reader of prompts with pictures for one model. Any thread may use an instance."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self._processor: Any = processor

    @property
    def chat_template(self) -> str | None:
        """Return the processor's chat template, which some checkpoints have in the place of the tokenizer's."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def prompt(self, text: str, urls: Sequence[str]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return the token ids of a rendered conversation, and the other arguments of the model's ``forward``.

        ``urls`` are the pictures in their order in the text.

        Raises:
            ApiError: a picture cannot be read, or the model's processor refuses the pictures.
        """
        if len(urls) > MOST_PICTURES:
            raise ApiError(400, f"{len(urls)} pictures: expected at most {MOST_PICTURES}", param="messages")
        pictures = pictures_at(urls)
        with any_error_as(_refused):
            given = self._processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
        ids = given.pop("input_ids")[0].tolist()
        others = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        others.pop("attention_mask", None)  # a single prompt has no padding
        return ids, others


def pictures_at(urls: Sequence[str]) -> list[Image]:
    """Return the pictures in data URLs, in RGB. Their sizes are checked before any of them is decoded.

    Raises:
        ApiError: one is no data URL with a PNG, JPEG, WebP or GIF picture, or they have too many pixels.
    """
    opened = list(map(_opened, urls))
    sizes = [picture.width * picture.height for picture in opened]
    for picture, size in zip(opened, sizes, strict=True):
        if size > _MOST_PIXELS:
            shown = f"{picture.width} × {picture.height} pixels"
            raise ApiError(400, f"a picture has {shown}: expected at most {_MOST_PIXELS} in all", param="messages")
    if sum(sizes) > _MOST_PIXELS:
        message = f"the pictures have {sum(sizes)} pixels: expected at most {_MOST_PIXELS} in all"
        raise ApiError(400, message, param="messages")
    return list(map(_decoded, opened))


def _opened(url: str) -> Image:
    """Return a picture of which only the header is read."""
    from PIL import Image

    match = _DATA_URL.fullmatch(url)
    if match is None:
        message = "a picture's URL is not data:image/…;base64,…: this server fetches no pictures from elsewhere"
        raise ApiError(400, message, param="messages")
    with any_error_as(_unreadable):
        return Image.open(io.BytesIO(base64.b64decode(match[1], validate=True)), formats=_FORMATS)


def _decoded(picture: Image) -> Image:
    with any_error_as(_unreadable):
        return picture.convert("RGB")


def _refused(error: Exception) -> ApiError:
    return ApiError(400, f"the model's processor refuses the pictures: {one_line(error)}", param="messages")


def _unreadable(error: Exception) -> ApiError:
    message = f"a picture cannot be read: expected {', '.join(_FORMATS)} in base64 ({type(error).__name__})"
    return ApiError(400, message, param="messages")


def picture_reader_at(location: str, revision: str | None) -> PictureReader | None:
    """Return the reader for a model that sees; None if its processor cannot be loaded, which is logged."""
    from transformers import AutoProcessor, ProcessorMixin

    place, found = locate(location), None
    with logged_errors(
        _logger,
        "%s takes text alone, because its processor of pictures cannot be loaded",
        location,
        level=logging.WARNING,  # a stranger's files may cause any error in the libraries
    ):
        is_here = Path(place).expanduser().exists()
        found = AutoProcessor.from_pretrained(place, revision=None if is_here else revision, trust_remote_code=False)
    return PictureReader(found) if isinstance(found, ProcessorMixin) else None
