"""OpenAI's files and batches, as its official client speaks them."""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from swarm_gateway.batch_api import store as store_module
from swarm_gateway.batch_api import worker as worker_module
from swarm_gateway.batch_api.store import BatchStore
from swarm_gateway.limits.admission import GatewayLimits
from swarm_gateway.web.database import Database
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import NoSwarm
from tests.unit.gateway.app.conftest import WAIT_S, Gateway, Serve

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Sort"}]},
    "/v1/completions": {"prompt": "Return"},
    "/v1/embeddings": {"input": "Return"},
}


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": DEFAULT_MODEL} | BODIES[url] | body
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def begin(gateway: Gateway, *lines: dict[str, Any] | str, url: str = CHAT, key: str = "none") -> Any:
    client = gateway.client(key)
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    file = client.files.create(file=("night.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"for": "ada"})


def until(gateway: Gateway, batch: Any, holds: Callable[[Any], bool], key: str = "none") -> Any:
    """The batch, once this holds of it."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds(batch := gateway.client(key).batches.retrieve(batch.id)):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.02)
    return batch


def ended(gateway: Gateway, batch: Any, key: str = "none") -> Any:
    waiting = ("validating", "in_progress", "cancelling")
    return until(gateway, batch, lambda batch: batch.status not in waiting, key)


def answers(gateway: Gateway, file_id: str | None, key: str = "none") -> dict[str, Any]:
    """What a file of answers says, by the names of the requests."""
    if file_id is None:
        return {}
    lines = gateway.client(key).files.content(file_id).text.splitlines()
    return {each["custom_id"]: each for each in map(json.loads, lines)}


@pytest.fixture
def gateway(serve: Serve) -> Gateway:
    found = serve(batches=BatchStore(None))
    found.says("a list")
    return found


@pytest.mark.parametrize("url", BODIES)
def test_a_batch_of_each_endpoint(gateway: Gateway, url: str) -> None:
    done = ended(gateway, begin(gateway, *(line(f"r{n}", url) for n in range(9)), url=url))
    assert (done.status, done.endpoint, done.metadata) == ("completed", url, {"for": "ada"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (9, 9, 0)
    assert done.error_file_id is None and done.completed_at >= done.in_progress_at >= done.created_at
    found = answers(gateway, done.output_file_id)
    assert list(found) == [f"r{n}" for n in range(9)]  # in the order of the file
    assert all(generation.request.is_background for generation in gateway.batcher.generations)
    body = found["r4"]["response"]["body"]
    assert found["r4"]["response"]["status_code"] == 200 and found["r4"]["error"] is None
    if url == CHAT:
        assert body["choices"][0]["message"]["content"] == "a list"
    else:
        assert body["object"] == ("list" if "embed" in url else "text_completion")
    assert gateway.client().files.retrieve(done.output_file_id).purpose == "batch_output"


def test_requests_that_cannot_be_answered_are_in_a_file_of_their_own(gateway: Gateway) -> None:
    done = ended(
        gateway, begin(gateway, line("good"), line("other", model="nobody/has"), line("long", max_tokens=5000))
    )
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 2)
    assert list(answers(gateway, done.output_file_id)) == ["good"]
    failed = {name: each["response"] for name, each in answers(gateway, done.error_file_id).items()}
    assert {name: each["status_code"] for name, each in failed.items()} == {"other": 404, "long": 400}
    assert failed["long"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("lines", "message", "number"),
    [
        ((line("a"), "so"), "the line is not JSON", 2),
        (("[]",), "the line is not a JSON object", 1),
        ((line("a"), line("a")), "another line has the custom_id 'a' too", 2),
        ((line("a", "/v1/completions"),), "expected that of the batch", 1),
        ((line("a", stream=True),), "no streams", 1),
        ((line("a", temperature=9),), "temperature", 1),
        ((line("a") | {"method": "GET"},), "method", 1),
        (("\n\n",), "no requests", None),
    ],
)
def test_a_file_that_is_no_batch_says_which_line_is_wrong(
    gateway: Gateway, lines: Any, message: str, number: int | None
) -> None:
    batch = begin(gateway, *lines)
    assert batch.status == "failed" and batch.failed_at is not None
    (error,) = batch.errors.data
    assert message in error.message and error.line == number
    assert not gateway.batcher.generations


def test_others_do_not_wait_for_a_batch(serve: Serve) -> None:
    """It has half of the generations at most, and begins none while somebody waits."""
    gateway = serve(GatewayLimits(max_active=4), batches=BatchStore(None))
    gateway.says("a list", ends=None)  # until it is cancelled
    batch = begin(gateway, *(line(f"r{n}") for n in range(9)))
    gateway.wait_for_generations(2)
    body = {"model": DEFAULT_MODEL, **BODIES[CHAT], "stream": True}
    with gateway.client().chat.completions.create(**body) as first, gateway.client().chat.completions.create(**body):
        assert next(iter(first)).choices
        assert len(gateway.wait_for_generations(2)) == 2 and len(gateway.batcher.generations) == 4
    cancelled = gateway.client().batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    done = ended(gateway, batch)
    assert (done.status, done.request_counts.completed) == ("cancelled", 0) and done.cancelled_at is not None
    assert all(generation.cancelled.wait(WAIT_S) for generation in gateway.batcher.generations)
    assert {each["error"]["code"] for each in answers(gateway, done.error_file_id).values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
        gateway.client().batches.cancel(batch.id)


def test_a_batch_goes_on_after_a_restart(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_RETRY_S", 0.05)
    path = tmp_path / "batches.sqlite"
    first = BatchStore(path)
    before = serve(GatewayLimits(max_active=2), batches=first)
    before.says("first")
    batch = begin(before, *(line(f"r{n}") for n in range(3)), line("last"))
    until(before, batch, lambda batch: batch.request_counts.completed)
    before.batcher.refuses = NoSwarm("nobody answers")  # what is not answered yet waits for the swarm
    before.stop()
    with pytest.raises(ValueError, match="another gateway"):
        BatchStore(path)
    of_a_worker = BatchStore(path, locks=False)  # its parent has locked the file
    assert of_a_worker.batch("", batch.id)["id"] == batch.id
    of_a_worker.close()
    first.close()
    after = serve(batches=BatchStore(path))
    after.says("second")
    done = ended(after, batch)
    assert (done.status, done.request_counts.completed) == ("completed", 4)
    found = answers(after, done.output_file_id)
    said = [found[name]["response"]["body"]["choices"][0]["message"]["content"] for name in found]
    assert list(found) == ["r0", "r1", "r2", "last"] and said[0] == "first" and set(said) <= {"first", "second"}
    assert path.stat().st_mode & 0o077 == 0


def test_a_batch_ends_whole_or_not_at_all(tmp_path: Path) -> None:
    """A gateway that stops while a batch ends leaves no file of answers that no batch names."""
    path = tmp_path / "batches.sqlite"
    store = BatchStore(path)
    store.add_batch("ada", {"id": "b", "status": "in_progress", "input_file_id": "f", "request_counts": {}})
    (batch,) = store.unfinished()
    for number, succeeded in enumerate((True, False)):
        store.add_answer("b", number, succeeded=succeeded, text="{}")
    with closing(sqlite3.connect(path)) as other:
        for event in ("UPDATE ON batches", "DELETE ON answers"):
            other.execute(f"CREATE TRIGGER full BEFORE {event} BEGIN SELECT RAISE(ABORT, 'no room'); END")
            with pytest.raises(sqlite3.Error, match="no room"):
                store.finish(batch, {"status": "cancelled"}, {1: "later", 2: "{}"})
            assert not store.files("ada") and store.unfinished() and store.answered("b") == {0, 1}
            other.execute("DROP TRIGGER full")
    store.finish(batch, {"status": "cancelled"}, {1: "later", 2: "{}"})
    done = store.batch("ada", "b")
    assert {done["output_file_id"], done["error_file_id"]} == {file["id"] for file in store.files("ada")}
    assert (
        done["request_counts"] == {"completed": 1, "failed": 2} and not store.unfinished() and not store.answered("b")
    )
    assert store.content(batch.owner, done["error_file_id"]) == b"{}\n{}\n"
    store.close()


def test_a_list_of_batches_is_one_query_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    store, statements, run = BatchStore(None), list[str](), Database.all
    none = {"total": 3, "completed": 0, "failed": 0}
    for number in range(9):
        store.add_batch("ada", {"id": f"b{number}", "status": "in_progress", "request_counts": none})
    for number, succeeded in enumerate((True, False, True)):
        store.add_answer("b3", number, succeeded=succeeded, text="{}")

    def counted(database: Database, statement: str, *values: Any) -> list[Any]:
        statements.append(statement)
        return run(database, statement, *values)

    monkeypatch.setattr(Database, "all", counted)
    batches = {batch["id"]: batch["request_counts"] for batch in store.batches("ada")}
    assert len(statements) == 1 and list(batches) == [f"b{number}" for number in reversed(range(9))]
    assert batches.pop("b3") == {"total": 3, "completed": 2, "failed": 1}
    assert all(counts == none for counts in batches.values()) and store.batches("bob") == []
    store.close()


def test_a_store_that_fails_is_answered_in_the_shape_of_errors(serve: Serve) -> None:
    store = BatchStore(None)
    url = serve(batches=store).url
    store.close()
    answer = httpx.get(f"{url}/v1/files", timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_a_swarm_that_fails_is_asked_again(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_RETRY_S", 0.05)
    monkeypatch.setattr(worker_module, "_LOOK_S", 0.02)
    gateway.batcher.refuses = NoSwarm("nobody answers")
    batch = begin(gateway, line("r"))
    assert gateway.client().batches.retrieve(batch.id).request_counts.failed == 0
    gateway.batcher.refuses = None
    assert ended(gateway, batch).request_counts.completed == 1


def test_a_batch_that_is_too_old_is_over(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_LOOK_S", 0.02)
    store = BatchStore(None)
    gateway = serve(GatewayLimits(max_active=2), batches=store)
    gateway.says("a list", ends=None)
    batch = begin(gateway, line("r0"), line("r1"))
    gateway.wait_for_generations(1)
    store.change(batch.id, {"expires_at": 1})
    done = ended(gateway, batch)
    assert (done.status, done.output_file_id) == ("expired", None)
    assert {each["error"]["code"] for each in answers(gateway, done.error_file_id).values()} == {"batch_expired"}


def test_a_batch_whose_file_is_gone_fails_and_holds_up_no_other(serve: Serve) -> None:
    batches = BatchStore(None)
    gateway = serve(batches=batches)
    gateway.batcher.ends = None
    first = begin(gateway, line("r0"))
    gateway.wait_for_generations(1)
    second = begin(gateway, line("r1"))
    batches._database.run("DELETE FROM files WHERE id = ?", second.input_file_id)
    gateway.says("a list")
    third = begin(gateway, line("r2"))
    gateway.client().batches.cancel(first.id)
    assert [ended(gateway, each).status for each in (first, second, third)] == ["cancelled", "failed", "completed"]


def test_a_key_sees_its_own_alone(serve: Serve) -> None:
    gateway = serve(keys=("sk-ada", "sk-bob"), batches=BatchStore(None))
    gateway.says("a list")
    batch = ended(gateway, begin(gateway, line("r"), key="sk-ada"), "sk-ada")
    ada, bob = gateway.client("sk-ada"), gateway.client("sk-bob")
    assert [each.id for each in ada.batches.list()] == [batch.id] and len(ada.files.list().data) == 2
    assert not bob.batches.list().data and not bob.files.list().data
    for ask in (
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.files.content(batch.output_file_id),
        lambda: bob.files.delete(batch.input_file_id),
        lambda: bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert ada.files.delete(batch.input_file_id).deleted
    assert [each.id for each in ada.files.list(purpose="batch_output")] == [batch.output_file_id]


def test_lists_come_in_pages(gateway: Gateway) -> None:
    ids = [ended(gateway, begin(gateway, line("r"))).id for _ in range(5)]
    page = gateway.client().batches.list(limit=2)
    assert [each.id for each in page.data] == ids[:2:-1] and page.has_more
    assert [each.id for each in gateway.client().batches.list(limit=2)] == ids[::-1]  # the client turns the pages
    for limit in ("0", "x", "101", "9" * 5000):
        assert httpx.get(f"{gateway.url}/v1/batches?limit={limit}", timeout=WAIT_S).status_code == 400


@pytest.mark.parametrize("metadata", [{"x" * 65: ""}, {"x": "y" * 513}, {str(number): "" for number in range(17)}])
def test_more_metadata_than_openai_takes_are_refused(gateway: Gateway, metadata: dict[str, str]) -> None:
    client = gateway.client()
    file = client.files.create(file=("night.jsonl", json.dumps(line("r")).encode()), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata)


def test_a_client_that_leaves_during_an_upload_is_no_failure_of_the_server(gateway: Gateway) -> None:
    host = gateway.url.removeprefix("http://")
    head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n"
    with socket.create_connection(host.split(":"), WAIT_S) as connection:
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode())
    deadline_s, found = time.monotonic() + WAIT_S, ""
    while 'swarm_requests_total{endpoint="/v1/files",' not in found:
        assert time.monotonic() < deadline_s, found
        found = httpx.get(f"{gateway.url}/metrics", timeout=WAIT_S).text
    assert 'swarm_requests_total{endpoint="/v1/files",status="499"} 1.0' in found


def test_files_that_are_refused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{gateway.url}/v1/files"
    form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}, "timeout": WAIT_S}

    def refused(status: int, sentence: str, **fields: Any) -> None:
        answer = httpx.post(url, **form | fields)
        assert answer.status_code == status and sentence in answer.json()["error"]["message"]

    refused(400, "expected 'batch'", data={"purpose": "fine-tune"})
    refused(400, "no file", files={"other": ("a", b"{}")})
    refused(403, "may not send files", headers={"Origin": "https://elsewhere.example"})
    refused(415, "multipart/form-data", **{"files": None, "data": None}, json={})
    refused(
        400, "the form is invalid", files=None, data=None, content=b"x", headers={"Content-Type": "multipart/form-data"}
    )
    host = gateway.url.removeprefix("http://")
    assert httpx.post(url, **form, headers={"Origin": f"http://{host}"}).status_code == 200  # our own page
    monkeypatch.setattr("swarm_gateway.batch_api.endpoints.MOST_FILE_BYTES", 100)
    refused(413, "larger than 100 bytes", files={"file": ("a", b"x" * 200)})


def test_there_is_room_for_so_much(serve: Serve, tmp_path: Path) -> None:
    gateway = serve(batches=BatchStore(None, most_bytes=100))
    file = gateway.client().files.create(file=("a", b"x" * 90), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="delete some"):
        gateway.client().files.create(file=("b", b"x" * 20), purpose="batch")
    gateway.client().files.delete(file.id)
    gateway.client().files.create(file=("b", b"x" * 20), purpose="batch")
    (tmp_path / "text").write_text("a text")
    with pytest.raises(ValueError, match="cannot be used for batches"):
        BatchStore(tmp_path / "text")
    assert store_module.MOST_BYTES == 2**30


def test_without_a_file_for_them_there_are_no_batches(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError):
        serve().client().batches.list()
