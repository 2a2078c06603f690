"""Our extension of streams: which servers compute an answer, and what happens to them, for whoever asks."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from swarm_client.batching.request import Servers
from swarm_client.core.events import Recovery, WrongAnswers
from swarm_client.routing.routing import Hop
from swarm_gateway.web.servers import described
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.span import Span
from tests.unit.gateway.app.conftest import Gateway
from tests.unit.support import server_record

ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Sort"}], "stream": True}
RECOVERY = Recovery(Span(2, 8), ("old",), "server …old did not answer", ("new",), 57, False, 0.8)


def servers(*blocks: str) -> Servers:
    return Servers(tuple(Hop(server_record(f"peer{each}", each), Span.parse(each)) for each in blocks))


def test_who_asks_gets_servers_and_events_between_the_text(gateway: Gateway) -> None:
    gateway.says("one two three four")
    gateway.batcher.happens = {0: servers("0:2", "2:8"), 2: RECOVERY, 3: servers("0:2", "2:6", "6:8")}
    chunks = list(gateway.client().chat.completions.create(**ASK, stream_options={"include_servers": True}))
    assert all(chunk.choices for chunk in chunks if chunk.model_extra == {})
    first, event, last = (chunk.swarm for chunk in chunks if not chunk.choices)
    assert chunks[0].swarm == first and first["index"] == 0
    assert [(server["peer_id"], server["span"]) for server in first["servers"]] == [
        ("peer0:2", [0, 2]),
        ("peer2:8", [2, 8]),
    ]
    assert [server["span"] for server in last["servers"]] == [[0, 2], [2, 6], [6, 8]]
    assert event["event"] == {
        "type": "recovery",
        "text": str(RECOVERY),
        "span": [2, 8],
        "failed": ["old"],
        "reason": "server …old did not answer",
        "replacements": ["new"],
        "replayed_tokens": 57,
        "from_copy": False,
        "stall_s": 0.8,
    }
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == "one two three four"


def test_completions_have_it_too_and_each_choice_its_own(gateway: Gateway) -> None:
    gateway.says("one two")
    gateway.batcher.happens = {0: servers("0:8")}
    ask = {"model": DEFAULT_MODEL, "prompt": "Sort", "n": 2, "stream": True}
    chunks = gateway.client().completions.create(**ask, stream_options={"include_servers": True})
    assert sorted(chunk.swarm["index"] for chunk in chunks if not chunk.choices) == [0, 1]


def test_who_does_not_ask_gets_nothing(gateway: Gateway) -> None:
    gateway.says("one two")
    gateway.batcher.happens = {0: servers("0:8")}
    assert all(chunk.choices and not chunk.model_extra for chunk in gateway.client().chat.completions.create(**ASK))


def test_it_is_for_streams(gateway: Gateway) -> None:
    ask = {**ASK, "stream": False, "stream_options": {"include_servers": True}}
    with pytest.raises(openai.BadRequestError, match="stream_options is only for streams"):
        gateway.client().chat.completions.create(**ask)


def test_what_strangers_call_themselves_is_escaped() -> None:
    event = WrongAnswers(Span(0, 2), "a\x1b[31mb", ())
    assert described(event)["event"]["type"] == "wrong_answers"
    assert "\x1b" not in described(event)["event"]["text"]
