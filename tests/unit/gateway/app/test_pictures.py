"""Pictures come in by all four APIs, and reach the model as its own processor gives them."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable
from typing import Any

import anthropic
import ollama
import openai
import pytest
import torch
from PIL import Image
from transformers import LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from swarm_gateway.web.pictures import MOST_PICTURES, PictureReader
from swarm_models.checkpoints.default_model import DEFAULT_MODEL

SIDE, PATCH = 28, 14
TOKENS_PER_PICTURE = (SIDE // PATCH) ** 2
# Takes parts alone, as LLaVA's own does, which reads nothing from plain text.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
)
TEXT = "What is it?"


def png(color: str, side: int = SIDE, kind: str = "PNG") -> str:
    """A picture of one color, in base64."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), color).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


RED, BLUE = png("red"), png("blue")


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> LlavaProcessor:
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<image>"]})
    own.chat_template = TEMPLATE
    size = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size),
        own,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


@pytest.fixture
def seeing(serve: Any, processor: LlavaProcessor) -> Any:
    gateway = serve(
        tokenizer=processor.tokenizer, vocab_size=len(processor.tokenizer), pictures=PictureReader(processor)
    )
    gateway.says("a red square")
    return gateway


def by_openai(gateway: Any, pictures: list[str]) -> str:
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in pictures]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}
    answer = gateway.client().chat.completions.create(model=DEFAULT_MODEL, messages=[message])
    return answer.choices[0].message.content


def by_responses(gateway: Any, pictures: list[str]) -> str:
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"} for data in pictures]
    content = [*parts, {"type": "input_text", "text": TEXT}]
    asked = [{"role": "user", "content": content}]
    return gateway.client().responses.create(model=DEFAULT_MODEL, input=asked).output_text


def by_anthropic(gateway: Any, pictures: list[str]) -> str:
    parts = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}} for data in pictures
    ]
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
    message = {"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}
    return client.messages.create(model=DEFAULT_MODEL, max_tokens=50, messages=[message]).content[0].text


def by_ollama(gateway: Any, pictures: list[str]) -> str:
    message = {"role": "user", "content": TEXT, "images": pictures}
    return ollama.Client(gateway.url).chat(model=DEFAULT_MODEL, messages=[message]).message.content


def test_the_chat_template_may_be_the_processor_s(processor: LlavaProcessor) -> None:
    assert PictureReader(processor).chat_template == TEMPLATE
    without = copy.copy(processor)
    without.chat_template = None
    assert PictureReader(without).chat_template is None


@pytest.mark.parametrize("ask", [by_openai, by_responses, by_anthropic, by_ollama])
def test_a_picture_is_what_the_processor_makes_of_it(seeing: Any, processor: Any, ask: Callable[..., str]) -> None:
    assert ask(seeing, [RED, BLUE]) == "a red square"
    (generation,) = seeing.batcher.generations
    expected = processor(
        text=[f"user: <image><image>{TEXT}\n"],
        images=[Image.new("RGB", (SIDE, SIDE), color) for color in ("red", "blue")],
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert list(generation.request.prompt) == expected["input_ids"][0].tolist()
    assert generation.request.prompt.count(processor.image_token_id) == 2 * TOKENS_PER_PICTURE
    assert generation.request.pictures.keys() == {"pixel_values"}
    assert torch.equal(generation.request.pictures["pixel_values"], expected["pixel_values"])


def test_text_alone_is_read_by_a_template_that_takes_parts(seeing: Any) -> None:
    message = {"role": "user", "content": TEXT}
    seeing.client().chat.completions.create(model=DEFAULT_MODEL, messages=[message])
    assert seeing.prompt == f"user: {TEXT}\n"
    assert not seeing.batcher.generations[-1].request.pictures


def test_a_stored_picture_is_seen_again(seeing: Any) -> None:
    client = seeing.client()
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{RED}"}]
    first = client.responses.create(model=DEFAULT_MODEL, input=[{"role": "user", "content": parts}])
    client.responses.create(model=DEFAULT_MODEL, input="And now?", previous_response_id=first.id)
    before, after = (generation.request.pictures["pixel_values"] for generation in seeing.batcher.generations)
    assert torch.equal(before, after)


@pytest.mark.parametrize("more", ["And now?", ""])
def test_pictures_in_results_of_tools_are_shown_by_the_user(seeing: Any, more: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": RED}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "a file"}]
    said = [{"type": "text", "text": more}] if more else []
    client = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    blocks = [{"type": "tool_result", "tool_use_id": "t1", "content": content}, *said]
    client.messages.create(model=DEFAULT_MODEL, max_tokens=50, messages=[{"role": "user", "content": blocks}])
    shown = "<image>" * TOKENS_PER_PICTURE
    assert seeing.prompt == f"tool: a file\nuser: {shown}{more}\n"
    parts = [{"type": "input_image", "image_url": data_url(RED)}, {"type": "input_text", "text": "a file"}]
    items = [{"type": "function_call_output", "call_id": "t1", "output": parts}]
    asked = [{"role": "user", "content": more}] if more else []
    seeing.client().responses.create(model=DEFAULT_MODEL, input=[*items, *asked])
    assert seeing.prompt == f"tool: a file\nuser: {shown}{more}\n"
    first, second = (generation.request.pictures["pixel_values"] for generation in seeing.batcher.generations)
    assert torch.equal(first, second)


def data_url(data: str) -> str:
    return f"data:image/png;base64,{data}"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/cat.png", "fetches no pictures from elsewhere"),
        ("file:///etc/passwd", "fetches no pictures from elsewhere"),
        (data_url("aGk="), "a picture cannot be read: expected PNG, JPEG, WEBP, GIF"),
        (data_url("%%%"), "a picture cannot be read"),
        (data_url(RED[: len(RED) // 2 // 4 * 4]), "a picture cannot be read"),
        (data_url(png("red", kind="BMP")), "a picture cannot be read"),
        (data_url(png("red", side=7000)), "a picture has 7000 × 7000 pixels: expected at most 40000000 in all"),
    ],
)
def test_a_bad_picture_is_refused(seeing: Any, url: str, reason: str) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with pytest.raises(openai.BadRequestError, match=reason):
        seeing.client().chat.completions.create(model=DEFAULT_MODEL, messages=[message])
    assert not seeing.batcher.generations


def test_too_many_pictures_are_refused(seeing: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=f"33 pictures: expected at most {MOST_PICTURES}"):
        by_openai(seeing, [RED] * (MOST_PICTURES + 1))


def test_pictures_are_too_large_together(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is decoded only once all are known to fit."""
    monkeypatch.setattr("swarm_gateway.web.pictures._MOST_PIXELS", 2 * SIDE**2 - 1)
    assert by_openai(seeing, [RED]) == "a red square"
    with pytest.raises(openai.BadRequestError, match=f"the pictures have {2 * SIDE**2} pixels"):
        by_openai(seeing, [RED, BLUE])


def test_only_users_show_pictures(seeing: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    with pytest.raises(openai.BadRequestError, match="pictures are a user's"):
        seeing.client().chat.completions.create(
            model=DEFAULT_MODEL, messages=[{"role": "assistant", "content": [part]}]
        )


def test_a_model_that_does_not_see_says_so(gateway: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="this model does not see"):
        by_openai(gateway, [RED])
