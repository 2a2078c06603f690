"""OpenAI's Responses API, as its official client speaks it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from swarm_gateway.limits.admission import ApiError
from swarm_gateway.responses_api.store import ResponseStore
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import NoSwarm
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, Serve
from tests.unit.gateway.app.tool_families import ADD, CALLS, LOOK

TOOLS = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True},
    {"type": "function", "name": "look", "parameters": LOOK},
]
ASK: dict[str, Any] = {"model": DEFAULT_MODEL, "input": "Sort"}


def ask(gateway: Gateway, stream: bool, **fields: Any) -> Any:
    if not stream:
        return gateway.client().responses.create(**ASK | fields)
    with gateway.client().responses.stream(**ASK | fields) as events:
        return list(events)[-1].response


def test_a_response_whole_and_in_events(gateway: Gateway) -> None:
    gateway.says("a list of words")
    client = gateway.client()
    whole = client.responses.create(**ASK, metadata={"for": "ada"}, max_output_tokens=50)
    assert (whole.output_text, whole.status, whole.model) == ("a list of words", "completed", DEFAULT_MODEL)
    assert (whole.metadata, whole.max_output_tokens, whole.error) == ({"for": "ada"}, 50, None)
    num_prompt, num_tokens = len(gateway.batcher.generations[0].request.prompt), len(gateway.batcher.says)
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (num_prompt, num_tokens)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "a list of words"
    assert last.output_text == "a list of words" and last.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_and_an_empty_one(gateway: Gateway, stream: bool) -> None:
    gateway.says("one two three")
    cut = ask(gateway, stream, max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete" and cut.usage.output_tokens == 1
    gateway.says("")
    assert [item.type for item in ask(gateway, stream).output] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions(caller: Gateway, stream: bool) -> None:
    caller.says("I look.\n" + CALLS["qwen"])
    message, *calls = ask(caller, stream, tools=TOOLS).output
    assert message.content[0].text.strip() == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1, "b": "é"}), ("look", {})]
    assert f"add {json.dumps(ADD, ensure_ascii=False)}look" in caller.prompt
    caller.says(CALLS["qwen"])
    one = ask(caller, stream, tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["function_call"]


def test_a_response_may_take_all_positions(serve: Serve) -> None:
    gateway = serve(max_positions=5000)
    gateway.says("a list")
    gateway.client().responses.create(**ASK)
    request = gateway.batcher.generations[-1].request
    assert request.config.max_new_tokens == 5000 - len(request.prompt)


def test_functions_in_a_namespace(caller: Gateway) -> None:
    """The model knows them by longer names, and the client by the names that it gave."""
    inner = [{**tool, "defer_loading": False} for tool in TOOLS]
    tools = [TOOLS[1], {"type": "namespace", "name": "sums", "description": "For sums.", "tools": inner}]
    caller.says(CALLS["qwen"].replace('"add"', '"sums__add"'))
    response = caller.client().responses.create(**ASK, tools=tools, extra_body={"client_metadata": {"turn": "1"}})
    assert [(call.namespace, call.name) for call in response.output] == [("sums", "add"), (None, "look")]
    assert "look {" in caller.prompt and "sums__add {" in caller.prompt and "sums__look {" in caller.prompt
    result = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": "seven"}
    items = [item.model_dump(exclude_none=True) for item in response.output]
    caller.client().responses.create(model=DEFAULT_MODEL, input=[*items, result], tools=tools)
    assert caller.prompt.startswith('assistant: sums__add({"a": 1, "b": "é"})look({})\ntool: seven\n')


def test_what_the_model_reads(caller: Gateway) -> None:
    caller.says("3")
    caller.client().responses.create(
        model=DEFAULT_MODEL,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Add"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "seven"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "here"}]},
            {"role": "user", "content": "And now?"},
        ],
        tools=TOOLS,
        store=False,
    )
    said = 'system: Be brief.\nuser: Add\nassistant: add({"a": 1})look({})\ntool: seven\ntool: here\nuser: And now?\n'
    assert caller.prompt.startswith(said)


def test_a_response_goes_on_from_another(serve: Serve) -> None:
    gateway = serve(keys=["ada", "eve"])
    client = gateway.client("ada")
    gateway.says("one")
    first = client.responses.create(**ASK, instructions="Be brief.")
    gateway.says("two")
    second = client.responses.create(model=DEFAULT_MODEL, input="More", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    gateway.says("three")
    client.responses.create(model=DEFAULT_MODEL, input="Yet more", previous_response_id=second.id, store=False)
    said = [part in gateway.prompt for part in ("Sort", "one", "More", "two", "Yet more", "Be brief.")]
    assert said == [True] * 5 + [False]  # instructions are those of the request alone
    assert client.responses.retrieve(first.id).output_text == "one"
    assert [item.content for item in client.responses.input_items.list(second.id)] == ["More"]
    with pytest.raises(openai.NotFoundError):
        gateway.client("eve").responses.create(**ASK, previous_response_id=first.id)
    client.responses.delete(first.id)
    for ask in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(**ASK, previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no such response"):
            ask()


def test_an_answer_that_follows_a_schema(gateway: Gateway) -> None:
    gateway.says('{"age": 36}')
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    response = gateway.client().responses.create(**ASK, text={"format": form})
    assert json.loads(response.output_text) == {"age": 36}
    assert gateway.batcher.generations[-1].request.processors  # the grammar


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "of type 'input_image' is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "of type 'item_reference' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "of type 'web_search' is not supported"),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "custom", "name": "f"}]}
                ]
            },
            "of type 'custom' is not supported",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools have the same name"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"previous_response_id": "resp_x"}, "no such response"),
        ({"input": []}, "messages"),
        ({"extra_body": {"nonsense": 1}}, "there is no field nonsense"),
    ],
)
def test_what_is_refused(gateway: Gateway, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=sentence):
        gateway.client().responses.create(**ASK | fields)


def test_an_error_in_a_stream(gateway: Gateway) -> None:
    gateway.says("a", ends=NoSwarm("the swarm is gone"))
    with pytest.raises(openai.APIError, match="the swarm is gone"):
        list(gateway.client().responses.create(**ASK, stream=True))
    body = {**ASK, "stream": True}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=WAIT_S).text
    name, data = answer.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["message"] == "the swarm is gone"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_stored_still_comes(
    gateway: Gateway, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ResponseStore, "add", refuse)
    gateway.says("a list")
    assert ask(gateway, stream).output_text == "a list" and "database or disk is full" in caplog.text


def response(number: int, previous: str | None = None) -> dict[str, Any]:
    return {"id": f"r{number}", "previous_response_id": previous, "output": [{"text": "x" * 100}]}


def test_the_store_keeps_what_fits_and_survives_in_a_file(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "responses", most_bytes=800)
    for number in range(10):
        store.add("the secret", response(number, f"r{number - 1}" if number > 8 else None), [{"n": number}])
    store.close()
    store = ResponseStore(tmp_path / "responses", most_bytes=800)
    items, num_bytes = store.conversation("the secret", "r9")
    assert [item.get("n") for item in items] == [8, None, 9, None]
    assert num_bytes == sum(len(json.dumps(each)) for each in ([{"n": 8}], [{"n": 9}], *[response(8)["output"]] * 2))
    store.add("the secret", response(10), [])
    for gone in ("r0", "r5", "other"):
        with pytest.raises(ApiError):
            store.get("the secret", gone)
    with pytest.raises(ApiError):
        store.get("other", "r10")
    store.delete("the secret", "r10")
    assert store.get("the secret", "r9")["id"] == "r9"
    store.close()
    assert (tmp_path / "responses").stat().st_mode & 0o777 == 0o600
    assert b"the secret" not in (tmp_path / "responses").read_bytes()  # keys are not in the file


def test_a_key_pushes_out_its_own_responses_and_not_those_of_others() -> None:
    store = ResponseStore(most_bytes=800)  # about five responses
    store.add("few", response(0), [])
    for number in range(1, 20):
        store.add("many", response(number), [])
    store.add("others", response(20) | {"output": "x" * 800}, [])  # more than there is room for
    assert store.get("few", "r0")["id"] == "r0" and store.get("many", "r19")["id"] == "r19"
    for key, gone in (("many", "r1"), ("others", "r20")):
        with pytest.raises(ApiError):
            store.get(key, gone)
    store.close()


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be used for responses: No such file or directory$"):
        ResponseStore(tmp_path / "nowhere" / "responses")
    (tmp_path / "text").write_text("something else" * 100)
    with pytest.raises(ValueError, match="cannot be used for responses"):
        ResponseStore(tmp_path / "text")
    with sqlite3.connect(tmp_path / "database") as database:
        database.execute("CREATE TABLE other (name TEXT)")
    database.close()
    before = (tmp_path / "database").read_bytes()
    with pytest.raises(ValueError, match="is something else"):
        ResponseStore(tmp_path / "database")
    assert (tmp_path / "database").read_bytes() == before
