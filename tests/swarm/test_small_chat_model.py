"""A real model: through servers it says what it says on its own, and it understands what it is asked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from swarm_client import DistributedModel
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, SMALL_CHAT_MODEL, locate
from swarm_protocol.errors import RequestRejected
from tests.small_chat_model import ANSWER, NEEDS_IT, QUESTION
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected
from tests.swarm.test_serve import ServeProcess
from tests.swarm.waiting import DEADLINE_S

pytestmark = NEEDS_IT

ROOM = 4096  # positions on each server
SPANS = ("0:15", "15:30")
QUESTIONS = ["What do you do with a hammer?", "How many days has a week?", "Why do cats purr?"]
TOOLS_TEMPLATE = (  # before the model's own: how Hermes and Qwen say it
    "{% if tools %}{{ '<|im_start|>system\\nAnswer with a call of a function.\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    '{{ \'<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n\' }}'
    "{% endif %}"
)
MOST_PERPLEXITY = {"int8": 1.02, "int4": 1.25}  # as a share of that of the model's own weights


def strings(*names: str) -> dict[str, Any]:
    """Return the schema of an object with these strings."""
    properties = {name: {"type": "string", "maxLength": 20} for name in names}
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The model as transformers itself reads it from the file, with words for tools in its chat template."""
    directory, file = tmp_path_factory.mktemp("real") / "smol", Path(locate(SMALL_CHAT_MODEL))
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)
    LlamaForCausalLM(read.config).save_pretrained(directory, state_dict=read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.chat_template = TOOLS_TEMPLATE + tokenizer.chat_template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def servers(directory) -> Iterator[InProcessServers]:
    with InProcessServers(directory, ROOM) as servers:
        servers.start(*SPANS)
        yield servers


@pytest.fixture(scope="module")
def remote(servers) -> Iterator[Any]:
    with DistributedModel.from_pretrained(str(servers.model), swarm=servers.swarm, draft="none") as model:
        yield model


@pytest.fixture(scope="module")
def local(directory) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(directory) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def text(tokenizer) -> torch.Tensor:
    """Tokens of English about Python, [1, tokens]."""
    return tokenizer((Path(locate(DEFAULT_MODEL)) / "heldout.txt").read_text(), return_tensors="pt").input_ids


def asked(tokenizer: Any, question: str) -> torch.Tensor:
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt").input_ids


def test_many_prompts_token_for_token(remote, local, tokenizer):
    for question in QUESTIONS:
        ids = asked(tokenizer, question)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
        assert remote.generate(ids, **options).tolist() == local.generate(ids, **options).tolist(), question


@pytest.mark.parametrize("quant", MOST_PERPLEXITY)
def test_perplexity_of_rounded_weights(quant, directory, local, text):
    ids = text[:, :256]
    with InProcessServers(directory, ROOM, memory_dht=True) as servers:
        servers.start("0:30", quant=quant)
        with connected(servers) as rounded, torch.no_grad():
            losses = [model(ids, labels=ids).loss.item() for model in (rounded, local)]
    assert math.exp(losses[1]) < 40  # it has learned English
    assert math.exp(losses[0] - losses[1]) < MOST_PERPLEXITY[quant]


def test_a_question_a_call_and_a_schema_over_http(servers, tmp_path):
    serving = ServeProcess("--model", str(servers.model), "--swarm", servers.swarm, directory=tmp_path)
    client = openai.OpenAI(base_url=serving.url, api_key="none", max_retries=0, timeout=DEADLINE_S)

    def ask(question: str, **options: Any) -> Any:
        turns = [{"role": "user", "content": question}]
        common = {"model": servers.model.name, "messages": turns, "temperature": 0, "max_tokens": 60}
        return client.chat.completions.create(**common, **options).choices[0]

    try:
        assert ask(QUESTION).message.content == ANSWER
        assert list(answers_by_other_apis(serving.url, servers.model.name)) == [ANSWER] * 3
        schema = {"name": "person", "schema": strings("name", "city")}
        filled = ask(
            "Anna is 31 years old and lives in Rome. Extract the name and the city as JSON.",
            response_format={"type": "json_schema", "json_schema": schema},
        )
        assert json.loads(filled.message.content) == {"name": "Anna", "city": "Rome"}
        tool = {"type": "function", "function": {"name": "weather", "parameters": strings("city")}}
        choice = ask("How is the weather in Paris?", tools=[tool], tool_choice="required", parallel_tool_calls=False)
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    finally:
        serving.end()


def answers_by_other_apis(url: str, model: str) -> Iterator[str]:
    """The answers to ``QUESTION`` that clients of the Responses API, Anthropic's API and Ollama's API get."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S)
    yield client.responses.create(model=model, input=QUESTION, temperature=0).output_text
    page, turns = url.removesuffix("/v1"), [{"role": "user", "content": QUESTION}]
    messages = anthropic.Anthropic(base_url=page, api_key="none", max_retries=0, timeout=DEADLINE_S).messages
    with messages.stream(model=model, messages=turns, max_tokens=60, extra_body={"temperature": 0}) as stream:
        yield stream.get_final_text()
    yield ollama.Client(page, timeout=DEADLINE_S).chat(model, turns, options={"temperature": 0}).message.content or ""


@pytest.mark.long
def test_a_document_of_as_many_tokens_as_the_model_has_positions(directory, local, text):
    most = local.config.max_position_embeddings
    ids = text[:, : most - 8]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = local.generate(ids, **options)
    with InProcessServers(directory, 2 * most, memory_dht=True) as servers:
        servers.start(*SPANS)
        with DistributedModel.from_pretrained(str(directory), swarm=servers.swarm) as remote:
            assert remote.generate(ids, **options).tolist() == expected.tolist()
            with pytest.raises(RequestRejected, match=f"need {most + 1} positions, but the model has {most}"):
                remote.generate(ids, **{**options, "max_new_tokens": 10})  # the last one has no position yet
