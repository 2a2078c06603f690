"""``/v1/embeddings`` as the ``openai`` package speaks it."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from swarm_gateway.generation.vectors import with_vectors
from swarm_gateway.limits.admission import GatewayLimits
from swarm_gateway.web.models import mean_hidden
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, Serve
from tests.zoo import SUPPORTED, save_checkpoint

TEXTS = ["Return a list", "so", "of 🦊", "and", "all the others", "too"]


def expected(ids: list[int]) -> list[float]:
    return [float(np.float32(value)) for value in (sum(ids) / len(ids), len(ids), 1 / 3)]


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_texts_and_tokens(gateway: Gateway, encoding: dict[str, Any]) -> None:
    """The client asks for base64 if nothing is said, and decodes it."""
    all_ids = [list(gateway.tokenizer(text).input_ids) for text in TEXTS]
    for given, ids in ((TEXTS, all_ids), (TEXTS[0], all_ids[:1]), (all_ids, all_ids), (all_ids[0], all_ids[:1])):
        answer = gateway.client().embeddings.create(model=DEFAULT_MODEL, input=given, **encoding)
        assert [each.index for each in answer.data] == list(range(len(ids)))
        found = [each.embedding for each in answer.data]
        if "base64" in encoding.values():
            found = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in found]
        assert np.allclose(found, [expected(each) for each in ids], rtol=1e-7)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        assert answer.model == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"dimensions": 2}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["so", 3]}, "input"),
        ({"input": [[5, 99999]]}, "input"),
        ({"input": ["so"] * 2049}, "input"),
        ({"input": "list " * 1200}, "input"),
        ({"input": [[5] * 1000] * 300}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"extra_body": {"truncate": True}}, "truncate"),
    ],
)
def test_what_is_refused(gateway: Gateway, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client().embeddings.create(**{"model": DEFAULT_MODEL, "input": "so"} | more)
    assert refused.value.param == param and param in str(refused.value)


async def test_other_work_goes_on_while_vectors_become_json() -> None:
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(other())
    body = await with_vectors({"model": "m"}, "data", ([float(number)] for number in range(9)))
    working.cancel()
    assert json.loads(body) == {"model": "m", "data": [[float(number)] for number in range(9)]}
    assert num_turns >= 9
    assert json.loads(await with_vectors({"model": "m"}, "data", [])) == {"model": "m", "data": []}


def test_they_wait_in_the_queue_and_leave_it(serve: Serve) -> None:
    gateway = serve(GatewayLimits(max_active=1, max_queued=3))
    for _ in range(3):
        assert len(gateway.client().embeddings.create(model=DEFAULT_MODEL, input=TEXTS).data) == len(TEXTS)
    lines = httpx.get(f"{gateway.url}/metrics", timeout=WAIT_S).text.splitlines()
    assert {"swarm_generations_active 0.0", "swarm_generations_queued 0.0"} <= set(lines)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_vector_is_the_mean_of_what_the_base_model_gives(tmp_path: Any, name: str) -> None:
    assert name in SUPPORTED
    save_checkpoint(name, tmp_path)
    ids = [3, 7, 11, 5, 2]
    with torch.no_grad():
        states = AutoModel.from_pretrained(tmp_path)(torch.tensor([ids])).last_hidden_state
    found = mean_hidden(AutoModelForCausalLM.from_pretrained(tmp_path), ids)
    assert torch.allclose(torch.tensor(found), states[0].mean(0), atol=1e-6)
