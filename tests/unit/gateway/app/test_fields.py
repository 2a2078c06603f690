"""Every field that OpenAI documents, which is what its package has, means something here or is refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import openai
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.unit.gateway.app.conftest import Gateway

CHANGE_NOTHING = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "store",
    "user",
}
CACHED = {"type": "text", "text": "Sort", "cache_control": {"type": "ephemeral"}}
NEEDED: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}]},
    "completions": {"model": DEFAULT_MODEL, "prompt": "Sort"},
    "embeddings": {"model": DEFAULT_MODEL, "input": "Sort"},
}
DOCUMENTED = {
    "chat/completions": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
}


def fields_of(path: str) -> list[str]:
    return [*get_type_hints(DOCUMENTED[path]), *(["stream"] if "completions" in path else [])]


def post(gateway: Gateway, path: str, **fields: Any) -> Any:
    return gateway.client().post(f"/{path}", cast_to=object, body=NEEDED[path] | fields)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_value_that_no_field_has_is_refused(gateway: Gateway, path: str) -> None:
    for name in fields_of(path):
        if name in CHANGE_NOTHING:
            post(gateway, path, **{name: {"a": "b"}})
            continue
        with pytest.raises(openai.BadRequestError) as refused:
            post(gateway, path, **{name: {"a": 7.5}})
        error = refused.value
        assert error.param.partition(".")[0] == name and name in error.body["message"], error
        assert error.code in ("unsupported_parameter", "invalid_value", "unknown_parameter")


@pytest.mark.parametrize("path", DOCUMENTED)
def test_null_is_as_if_it_were_not_there(gateway: Gateway, path: str) -> None:
    for name in fields_of(path):
        if name not in NEEDED[path]:
            post(gateway, path, **{name: None})


CLIENTS: dict[str, dict[str, Any]] = {  # what stock clients send
    "Open WebUI": {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8, "max_tokens": 8},
    "LangChain": {"n": 1, "stream": False, "max_completion_tokens": 8, "parallel_tool_calls": True, "logprobs": False},
    "LangChain's output": {"response_format": {"type": "json_object"}, "stream": False},
    "llm": {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8, "seed": 3},
    "agents": {"store": False, "service_tier": "auto", "tool_choice": "auto", "tools": [], "prompt_cache_key": "a"},
    "agents' settings": {"store": True, "reasoning_effort": "low", "verbosity": "low", "service_tier": "flex"},
    "AutoGen": {"response_format": {"type": "text"}, "messages": [{"role": "user", "content": "Sort", "name": "ada"}]},
    "LiteLLM": {"messages": [{"role": "user", "content": [CACHED], "cache_control": {"type": "ephemeral"}}]},
    "vLLM's benchmark": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "llama.cpp's": {"repeat_penalty": 1.1, "top_k": 40, "min_p": 0.05},
    "without logprobs": {"logprobs": False, "top_logprobs": 0},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_stock_clients_send_is_taken(gateway: Gateway, client: str) -> None:
    post(gateway, "chat/completions", **CLIENTS[client])
    assert len(gateway.batcher.generations) == 1
