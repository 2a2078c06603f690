"""Which files a server takes for a model that its swarm serves: its own, or those of other members."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import ALIASES, DEFAULT_MODEL, FROM_SWARM, locate
from swarm_models.sharing import obtaining
from swarm_models.sharing.hashing import FileHashes
from swarm_models.sharing.obtaining import NothingServed, SharingSwarm, open_from_swarm, open_served
from swarm_protocol.dht.records import ServerState, SwarmView
from swarm_protocol.errors import CheckpointError, PeerUnavailable
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.command_line import parse_args, read_config
from swarm_server.node.server import _model_flag
from swarm_server.weights.offering import Offering
from tests.unit.support import run, server_record
from tests.worlds.virtual_time import run_virtually

PEER = "/ip4/192.0.2.1/tcp/1/p2p/QmdUtnPbuY3WTo3fZTDxigxcQoQQuFXn9QVnM3eJhRR4mq"


class Member:
    """A server of a model in a directory, called without a network."""

    def __init__(self, directory: Path) -> None:
        self.offering = Offering(ModelCheckpoint.open(directory), None, hashes=FileHashes(directory.parent / "kept"))
        run(self.offering.refresh())
        checkpoint = self.offering._checkpoint
        self.num_blocks, self.model = checkpoint.family.num_blocks, checkpoint.name
        self.record = server_record(
            peer_id=directory.parent.name,
            model=self.model,
            revision=checkpoint.revision,
            num_blocks=self.num_blocks,
            weights=self.offering.digest,
        )

    def GetOffer(self, _request: pb.OfferRequest) -> AsyncIterator[pb.OfferPart]:
        return _Call(self.offering.parts(Caller("joiner")), pb.OfferPart)

    def GetPiece(self, request: pb.PieceRequest) -> AsyncIterator[pb.PiecePart]:
        return _Call(self.offering.piece(Caller("joiner"), request.sha256), pb.PiecePart)


class _Call:
    def __init__(self, parts: Any, kind: type) -> None:
        self._parts, self._kind = parts, kind

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for data in self._parts:
            yield self._kind(data=data)

    def cancel(self) -> None:
        pass


def made(directory: Path) -> Path:
    shutil.copytree(locate(DEFAULT_MODEL), directory, ignore=shutil.ignore_patterns("README.md", "*.txt"))
    return directory


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(obtaining, "_LOOK_S", 0.0)


def opened(name: str, *members: Member, **options: Any) -> ModelCheckpoint:
    async def scenario() -> ModelCheckpoint:
        loop = asyncio.get_running_loop()

        async def models() -> dict[str, int]:
            return {member.model: member.num_blocks for member in members}

        async def view(model: str, _num_blocks: int) -> SwarmView:
            return SwarmView(tuple(member.record for member in members if member.model == model))

        async def stub(record: Any) -> Any:
            found = next(member for member in members if member.record.peer_id == record.peer_id)
            if not isinstance(found, Member):
                raise PeerUnavailable("it is not there", record.peer_id)
            return found

        swarm = SharingSwarm(
            models, view, stub, lambda fetching: asyncio.run_coroutine_threadsafe(fetching, loop).result()
        )
        found = await open_served(swarm, name, **options)
        await asyncio.to_thread(found.stored, lambda _name: True)
        return found

    return run(scenario())


def test_the_only_model_comes_from_members(tmp_path: Path) -> None:
    members = [Member(made(tmp_path / name / "tiny")) for name in ("first", "second")]
    found = opened("", *members)
    assert (found.name, found.revision) == ("tiny", members[0].record.revision)
    assert Path(found.location).is_relative_to(tmp_path / "cache" / "swarm" / "hub" / "models--tiny" / "snapshots")
    assert (Path(found.location) / "tokenizer.json").is_file()


def test_what_was_taken_before_is_enough(tmp_path: Path) -> None:
    member = Member(made(tmp_path / "first" / "tiny"))
    opened("tiny", member)
    silent(member)
    assert Path(opened("tiny", member).location, "model.safetensors").is_file()  # nobody offers anything now


def test_a_model_that_is_on_this_machine_is_not_fetched(tmp_path: Path) -> None:
    member = SimpleNamespace(model=DEFAULT_MODEL, num_blocks=20)
    local = ModelCheckpoint.open(locate(DEFAULT_MODEL))
    member.record = server_record(model=DEFAULT_MODEL, revision=local.revision, num_blocks=20)
    found = opened("", member)
    assert found.location == locate(DEFAULT_MODEL) and not (tmp_path / "cache" / "swarm" / "hub").exists()


def test_most_members_decide_and_a_digest_decides_against_them(tmp_path: Path) -> None:
    members = [Member(made(tmp_path / name / "tiny")) for name in ("first", "second")]
    template = made(tmp_path / "third" / "tiny") / "chat_template.jinja"
    template.write_text("another")
    members.append(Member(template.parent))
    assert len({member.record.revision for member in members}) == 1
    assert not (Path(opened("tiny", *members).location) / template.name).exists()
    wanted = members[2].offering.digest.hex()
    assert (Path(opened("tiny", *members, weights=wanted).location) / template.name).read_text() == "another"
    with pytest.raises(CheckpointError, match=rf"no member offers the weights {'0' * 64}: expected one of"):
        opened("tiny", *members, weights="0" * 64)


def silent(member: Member) -> None:
    """It offers nothing any more."""
    record = member.record
    member.record = server_record(
        peer_id=record.peer_id, model=member.model, revision=record.revision, num_blocks=member.num_blocks
    )


def with_licence(directory: Path) -> Member:
    (made(directory) / "LICENSE").write_text("another")
    return Member(directory)


def test_a_copy_with_the_wanted_digest_is_enough_and_no_other_is(tmp_path: Path) -> None:
    member, other = Member(made(tmp_path / "first" / "tiny")), with_licence(tmp_path / "second" / "tiny")
    digest = opened("tiny", member).files.store.manifest.digest.hex()
    assert opened("tiny", other, weights=digest).files.store.manifest.digest.hex() == digest
    for is_offered in (True, False):
        with pytest.raises(CheckpointError, match=r"no member (offers the weights abab|of the swarm offers its files)"):
            opened("tiny", member, weights="ab" * 32)
        if is_offered:
            silent(member)


def test_the_wanted_digest_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_models.sharing.members._MAX_AGE_S", -1.0)
    late, other = Member(made(tmp_path / "first" / "tiny")), with_licence(tmp_path / "second" / "tiny")
    full, looks = late.record, []
    silent(late)

    def offered(_request: pb.OfferRequest) -> AsyncIterator[pb.OfferPart]:
        looks.append(1)
        if len(looks) == 3:
            late.record = full
        return Member.GetOffer(other, _request)

    other.GetOffer = offered
    found = opened("tiny", late, other, weights=full.weights.hex())
    assert found.files.store.manifest.digest == full.weights and len(looks) >= 3


def test_the_last_look_is_not_waited_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obtaining, "_LOOK_S", 3.0)
    looked_s: list[float] = []

    class Nobody:
        async def manifest(self, _wanted: bytes | None) -> None:
            looked_s.append(asyncio.get_running_loop().time())

    async def scenario() -> float:
        assert await obtaining._manifest(Nobody(), None) is None
        return asyncio.get_running_loop().time()

    assert run_virtually(scenario()) == looked_s[-1] == 3.0 * (len(looked_s) - 1) > 0


def announced(peer_id: str, model: str, revision: str, **fields: Any) -> SimpleNamespace:
    """A stranger's record, with no server behind."""
    record = server_record(peer_id=peer_id, model=model, revision=revision, num_blocks=20, **fields)
    return SimpleNamespace(model=model, num_blocks=20, record=record)


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": bytes(32), "addresses": ("8.8.8.8:1",)},  # many at one address
        {"addresses": ()},  # they offer nothing
        {"weights": bytes(32), "addresses": (), "state": ServerState.DRAINING},
    ],
)
def test_records_without_addresses_or_weights_choose_no_revision(tmp_path: Path, fields: dict[str, Any]) -> None:
    members = [Member(made(tmp_path / name / "tiny")) for name in ("first", "second", "third")]
    strangers = [announced(f"stranger {number}", "tiny", "e" * 16, **fields) for number in range(9)]
    assert opened("tiny", *members, *strangers).revision == members[0].record.revision


def test_the_wanted_digest_chooses_the_revision(tmp_path: Path) -> None:
    member = Member(made(tmp_path / "first" / "tiny"))
    strangers = [announced(f"stranger {number}", "tiny", "e" * 16, weights=bytes(32)) for number in range(9)]
    found = opened("tiny", member, *strangers, weights=member.offering.digest.hex())
    assert found.revision == member.record.revision


@pytest.mark.parametrize(
    ("model", "revision"),
    [
        ("a b", "0" * 40),
        ("a b", "f" * 16),
        ("..", "0" * 40),
        ("/etc", "0" * 16),
        ("a--b", "0" * 40),
        ("x.gguf", "0" * 40),
        ("tiny", "main"),
        ("tiny", "../.."),
        ("tiny", "Z" * 16),
    ],
)
def test_strangers_names_of_models_and_revisions_are_no_traceback(tmp_path: Path, model: str, revision: str) -> None:
    with pytest.raises(CheckpointError):
        opened("", announced("stranger", model, revision, weights=bytes(32)))
    if model == "tiny":
        member = Member(made(tmp_path / "first" / "tiny"))
        strangers = [announced(f"stranger {number}", model, revision, weights=bytes(32)) for number in range(9)]
        assert opened("", member, *strangers).revision == member.record.revision


def test_no_default_model_is_taken_for_the_wanted_digest(caplog: pytest.LogCaptureFixture) -> None:
    async def models() -> dict[str, int]:
        return {}

    swarm = SharingSwarm(models, None, None, None)
    with caplog.at_level(logging.WARNING):
        assert run(open_from_swarm(swarm, "")).name == DEFAULT_MODEL
    assert f"the swarm serves no model yet: taking {DEFAULT_MODEL}" in caplog.text
    with pytest.raises(NothingServed):
        run(open_from_swarm(swarm, "", weights="0" * 64))


def test_one_empty_reading_of_the_dht_does_not_decide() -> None:
    readings = [{}, {}, {"one": 1, "two": 1}]

    async def models() -> dict[str, int]:
        return readings.pop(0)

    with pytest.raises(CheckpointError, match="serves 2 models, one, two"):
        run(open_from_swarm(SharingSwarm(models, None, None, None), ""))


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_asked_for_by_the_names_that_servers_announce(alias: str) -> None:
    model = ALIASES[alias]
    for served in (alias, model.hub, model.file):
        assert obtaining._served({"other": 1, served: 30}, alias) == (served, 30)
    with pytest.raises(CheckpointError, match=f"does not serve {alias}: it has other"):
        obtaining._served({"other": 1}, alias)


@pytest.mark.parametrize(
    ("asked", "served", "flag"),
    [
        (DEFAULT_MODEL, DEFAULT_MODEL, ""),
        (FROM_SWARM, DEFAULT_MODEL, ""),  # everybody has it
        (FROM_SWARM, "tiny", " --model swarm://tiny"),
        ("swarm://owner/model", "owner/model", " --model swarm://owner/model"),
        (f"here/{DEFAULT_MODEL}", DEFAULT_MODEL, f" --model here/{DEFAULT_MODEL}"),
        (FROM_SWARM, "$(reboot)", " --model 'swarm://$(reboot)'"),
    ],
)
def test_the_next_machine_takes_the_model_from_the_swarm_too(asked: str, served: str, flag: str) -> None:
    assert _model_flag(asked, served) == flag


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingServed, match="serves no model: start a server with --model"):
        opened("")
    members = [Member(made(tmp_path / "first" / name)) for name in ("one", "two")]
    with pytest.raises(CheckpointError, match=r"serves 2 models, one, two: say which one with --model swarm://NAME"):
        opened("", *members)
    with pytest.raises(CheckpointError, match="does not serve three: it has one, two"):
        opened("three", *members)
    silent(members[0])
    with pytest.raises(CheckpointError, match=r"no member of the swarm offers its files.*--share-weights always"):
        opened("one", members[0])


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionRefusedError("refused")])
def test_a_swarm_that_cannot_be_read_is_said(error: OSError) -> None:
    async def failing(*_args: Any) -> Any:
        raise error

    async def models() -> dict[str, int]:
        return {"tiny": 20}

    for known in (failing, models):
        with pytest.raises(CheckpointError, match=r"the swarm's DHT cannot be read: (no answer in time|refused); try"):
            run(open_served(SharingSwarm(known, failing, failing, failing), "tiny"))


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ([], DEFAULT_MODEL),
        (["--initial-peers", PEER], FROM_SWARM),
        (["--initial-peers", PEER, "--model", "owner/model"], "owner/model"),
        (["--model", "swarm://owner/model", "--initial-peers", PEER], "swarm://owner/model"),
    ],
)
def test_the_model_that_is_served_without_a_name(arguments: list[str], model: str) -> None:
    assert read_config(parse_args(arguments)).model == model
