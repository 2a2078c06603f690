"""What a server offers of its checkpoint: to whom, at what rate, and what a machine without a copy makes of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.checkpoints.files import HubModel
from swarm_models.sharing.download import LEAST_BYTES_PER_S, Download, OfferingMember
from swarm_models.sharing.hashing import FileHashes
from swarm_models.sharing.manifest import HeldPieces, Manifest
from swarm_models.sharing.piece_store import PieceStore
from swarm_models.sharing.swarm_files import SwarmFiles
from swarm_protocol.errors import CheckpointError, PeerBusy, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_server.core.config import ServerConfig
from swarm_server.node.presence import offered_bytes_per_s
from swarm_server.weights import offering
from swarm_server.weights.offering import CompetingTraffic, Offering, rate_beside
from tests.unit.support import run
from tests.worlds.virtual_time import at_once, run_virtually

CALLER = Caller("client", "192.0.2.1")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory as a user has it, with things in it that are not for others."""
    directory = tmp_path / "tiny"
    shutil.copytree(locate(DEFAULT_MODEL), directory)
    (directory / "modeling_evil.py").write_text("raise SystemExit")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "secret.txt").write_text("secret")
    return directory


def offered(
    directory: Path, rate: float | None = None, load: Callable[[], CompetingTraffic] = CompetingTraffic
) -> Offering:
    return Offering(ModelCheckpoint.open(directory), rate, load, FileHashes(directory.parent / "kept"))


async def joined(parts: AsyncIterator[bytes]) -> bytes:
    return b"".join(await listed(parts))


async def listed(parts: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in parts]


async def manifest_of(server: Offering) -> HeldPieces:
    await server.refresh()
    return HeldPieces.parse(await joined(server.parts(CALLER)), server.digest)


def test_data_are_offered_and_nothing_else(source: Path) -> None:
    server = offered(source)
    offer = run(manifest_of(server))
    names = {file.name for file in offer.manifest.files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"modeling_evil.py", "pytorch_model.bin", "secret.txt"} & names
    for file in offer.manifest.files:
        assert file.sha256 == sha256((source / file.name).read_bytes()).digest()
        assert offer.held[file.key] == set(range(len(file.pieces)))
        sent = [run(joined(server.piece(CALLER, digest))) for digest in file.pieces]
        assert b"".join(sent) == (source / file.name).read_bytes()
    with pytest.raises(RequestRejected, match="does not have the piece"):
        run(joined(server.piece(CALLER, bytes(32))))


def test_a_link_to_elsewhere_is_not_offered(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (source / "vocab.txt").symlink_to(tmp_path / "secret")
    server = offered(source)
    run(server.refresh())
    assert not server.digest


def test_a_file_that_has_changed_is_not_sent(source: Path) -> None:
    server = offered(source)
    offer = run(manifest_of(server))
    file = offer.manifest.file("config.json")
    (source / "config.json").write_bytes(b"{}")
    with pytest.raises(RequestRejected, match="does not have the piece"):
        run(joined(server.piece(CALLER, file.pieces[0])))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (Path.unlink, "the file cannot be read any more: No such file"),
        (lambda path: path.write_bytes(b"{}"), "the file is shorter than it was"),
    ],
)
def test_a_file_that_goes_while_a_piece_is_sent_is_refused(
    source: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    """Asking again does not help, so that the server is not merely busy."""
    server = offered(source)
    file = run(manifest_of(server)).manifest.file("model.safetensors")

    async def scenario() -> None:
        async with aclosing(server.piece(CALLER, file.pieces[0])) as parts:
            await anext(parts)
            damage(source / file.name)
            await joined(parts)

    with pytest.raises(RequestRejected, match=sentence):
        run(scenario())


def test_never_offers_nothing(source: Path) -> None:
    server = offered(source, rate=0)
    run(server.refresh())
    assert not server.digest
    with pytest.raises(RequestRejected, match="offers no weights"):
        run(joined(server.parts(CALLER)))


def test_a_rate_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering.asyncio, "to_thread", at_once)
    server = offered(source, rate=100_000.0)
    run(server.refresh())
    file = FileHashes(source).of(source / "tokenizer.json", "tokenizer.json")

    async def scenario() -> float:
        start_s = asyncio.get_running_loop().time()
        for _ in range(5):
            await joined(server.piece(CALLER, file.pieces[0]))
        return asyncio.get_running_loop().time() - start_s

    expected_s = 5 * file.size_bytes / 100_000.0
    assert run_virtually(scenario()) == pytest.approx(expected_s, abs=0.2)  # a tenth of a second of it may pass at once


def test_beside_sessions_little_is_sent_at_a_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's packets wait for the part before them: 5 ms on a line of which files may take half."""
    monkeypatch.setattr(offering.asyncio, "to_thread", at_once)
    load = CompetingTraffic()
    server = offered(source, load=lambda: load)
    digest = run(manifest_of(server)).manifest.file("model.safetensors").pieces[0]

    def largest_part() -> int:
        return max(len(part) for part in run_virtually(listed(server.piece(CALLER, digest))))

    alone = largest_part()
    load = CompetingTraffic(has_sessions=True, line_bytes_per_s=12.5e6)
    assert largest_part() == 0.005 * load.line_bytes_per_s < alone / 4
    load = CompetingTraffic(has_sessions=True, line_bytes_per_s=100.0)  # no part is so small that headers outweigh it
    assert largest_part() > 1000


def test_sessions_come_first() -> None:
    assert rate_beside(CompetingTraffic(has_sessions=False, line_bytes_per_s=1e6)) == float("inf")
    assert rate_beside(CompetingTraffic(has_sessions=True, line_bytes_per_s=1e6)) == 5e5
    assert (
        0 < rate_beside(CompetingTraffic(has_sessions=True)) < 12.5e6
    )  # a line that was not measured may be a slow one


async def test_one_caller_does_not_take_all_places(source: Path) -> None:
    server = offered(source)
    file = (await manifest_of(server)).manifest.files[0]
    held = [server.piece(CALLER, file.pieces[0]) for _ in range(4)]
    for parts in held:
        await anext(parts)
    with pytest.raises(PeerBusy, match="this peer has 4 pieces of weights being sent already"):
        await joined(server.piece(CALLER, file.pieces[0]))
    assert await joined(server.piece(Caller("other", "192.0.2.2"), file.pieces[0]))
    for parts in held:
        await parts.aclose()
    assert await joined(server.piece(CALLER, file.pieces[0]))


async def test_places_are_taken_before_the_disk_is_asked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = offered(source)
    file = (await manifest_of(server)).manifest.files[0]
    answered = asyncio.Event()

    async def held(*_args: Any) -> frozenset[int]:
        await answered.wait()
        return frozenset()

    monkeypatch.setattr(server, "_held", held)
    waiting = [asyncio.ensure_future(joined(server.piece(CALLER, file.pieces[0]))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(PeerBusy, match="this peer has 4 pieces of weights being sent already"):
        async with asyncio.timeout(1.0):
            await joined(server.piece(CALLER, file.pieces[0]))
    answered.set()
    refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in refused] == [RequestRejected] * 4


def test_a_slow_line_is_not_divided_among_too_many(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members give up a piece that arrives at less than the least speed."""
    monkeypatch.setattr(offering.asyncio, "to_thread", at_once)
    server = offered(source, rate=4.5 * LEAST_BYTES_PER_S)
    run(server.refresh())
    file = FileHashes(source).of(source / "tokenizer.json", "tokenizer.json")

    async def sent(index: int) -> bool:
        start_s = asyncio.get_running_loop().time()
        try:
            await joined(server.piece(Caller(str(index), f"192.0.2.{index}"), file.pieces[0]))
        except PeerBusy:
            return False
        took_s = asyncio.get_running_loop().time() - start_s
        assert took_s < file.size_bytes / LEAST_BYTES_PER_S
        return True

    async def scenario() -> list[bool]:
        return await asyncio.gather(*map(sent, range(8)))

    assert sum(run_virtually(scenario())) == 2
    assert run(joined(server.parts(CALLER)))


def test_a_piece_that_is_in_two_files_is_sent_as_long_as_one_is_there(source: Path) -> None:
    for name in ("LICENSE", "NOTICE"):
        (source / name).write_text("the same")
    server = offered(source)
    digest = run(manifest_of(server)).manifest.file("LICENSE").pieces[0]
    (source / "NOTICE").unlink()
    assert run(joined(server.piece(CALLER, digest))) == b"the same"


async def test_offers_are_sent_while_all_places_of_pieces_are_taken(source: Path) -> None:
    server = offered(source, rate=LEAST_BYTES_PER_S)
    file = (await manifest_of(server)).manifest.file("config.json")
    async with aclosing(server.piece(CALLER, file.pieces[0])) as parts:
        await anext(parts)
        with pytest.raises(PeerBusy, match="there are 1 pieces of weights being sent already"):
            await joined(server.piece(Caller("other", "192.0.2.2"), file.pieces[0]))
        assert await joined(server.parts(Caller("other", "192.0.2.2")))


@pytest.mark.parametrize(
    ("value", "rate"), [("auto", None), ("always", None), ("never", 0.0), ("10MB", 10e6), ("1GiB", 2**30)]
)
def test_rates_of_the_command_line(value: str, rate: float | None) -> None:
    assert ServerConfig(share_weights=value).share_bytes_per_s == rate


@pytest.mark.parametrize("value", ["", "sometimes", "0", "-1MB"])
def test_a_wrong_rate_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="expected auto, always, never, or bytes per second, such as 10MB"):
        ServerConfig(share_weights=value)


@pytest.mark.parametrize(
    ("value", "is_private", "open_to_clients", "rate"),
    [
        ("auto", False, False, 0.0),
        ("auto", True, False, None),
        ("auto", True, True, 0.0),
        ("always", False, False, None),
        ("10MB", False, False, 10e6),
        ("never", True, False, 0.0),
    ],
)
def test_a_directory_is_offered_to_strangers_only_if_that_is_said(
    value: str, is_private: bool, open_to_clients: bool, rate: float | None, source: Path
) -> None:
    starting = SimpleNamespace(
        config=ServerConfig(share_weights=value, open_to_clients=open_to_clients),
        access=SimpleNamespace(control=object() if is_private else None),
        checkpoint=ModelCheckpoint.open(source),
    )
    assert offered_bytes_per_s(starting) == rate
    starting.checkpoint = ModelCheckpoint.open(locate(DEFAULT_MODEL))  # everybody has it
    assert offered_bytes_per_s(starting) == starting.config.share_bytes_per_s


@pytest.mark.parametrize(
    ("said", "is_offered"),
    [
        (SimpleNamespace(private=False, gated=False), True),
        (SimpleNamespace(private=True, gated=False), False),
        (SimpleNamespace(private=False, gated="auto"), False),
        (RepositoryNotFoundError, False),
        (OfflineModeIsEnabled, False),
    ],
)
@pytest.mark.parametrize("public_only", [True, False])
def test_a_model_of_the_hub_is_offered_to_strangers_only_if_anybody_can_have_it(
    said: object, is_offered: bool, public_only: bool, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that this machine has is not used to find that out."""

    def model_info(api: HfApi, _name: str, **_how: object) -> object:
        assert api.token is False
        if isinstance(said, type):
            raise said.__new__(said)
        return said

    checkpoint = ModelCheckpoint.open(source)
    own = checkpoint.files.local
    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(HubModel, "local", lambda _files, name: own(name))
    checkpoint.files = HubModel("me/private", None, "token")
    server = Offering(checkpoint, None, hashes=FileHashes(source.parent / "kept"), public_only=public_only)
    run(server.refresh())
    assert bool(server.digest) == (is_offered or not public_only)


def test_weights_are_named_by_a_digest() -> None:
    assert ServerConfig(model="swarm://", weights="0f" * 32).weights
    with pytest.raises(ValueError, match="expected 64 digits"):
        ServerConfig(model="swarm://", weights="0F")
    with pytest.raises(ValueError, match="owner/model may come from this machine or the hub: expected model swarm://o"):
        ServerConfig(model="owner/model", weights="0f" * 32)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("manifest", "hashing", "piece_store"):
        monkeypatch.setattr(f"swarm_models.sharing.{module}.PIECE_BYTES", 16384)
    monkeypatch.setattr(offering, "PIECE_BYTES", 16384)


class Machine:
    """One that has no copy: it takes its files from a server."""

    def __init__(self, server: Offering, cache: Path, manifest: Manifest) -> None:
        self.asked: list[bytes] = []
        self._server = server

        async def find() -> list[OfferingMember]:
            data = await joined(server.parts(CALLER))
            return [OfferingMember("server", HeldPieces.parse(data, server.digest), self._read)]

        store = PieceStore(manifest, cache)
        self.files = SwarmFiles(store, Download(store, find), run)
        run(self.files.open())

    async def _read(self, digest: bytes) -> AsyncIterator[bytes]:
        self.asked.append(digest)
        async with aclosing(self._server.piece(CALLER, digest)) as parts:
            async for part in parts:
                yield part


@pytest.mark.usefixtures("small_pieces")
def test_a_machine_without_a_copy_reads_the_blocks_that_it_needs(source: Path, tmp_path: Path) -> None:
    server, local = offered(source), ModelCheckpoint.open(source)
    manifest = run(manifest_of(server)).manifest
    machine = Machine(server, tmp_path / "cache", manifest)
    remote = ModelCheckpoint(machine.files)
    assert (remote.name, remote.revision) == (local.name, local.revision)
    assert remote.config.to_dict() == local.config.to_dict() | {"_name_or_path": remote.config._name_or_path}
    last = local.family.num_blocks - 1
    for name, tensor in remote.block_tensors(last).items():
        assert torch.equal(tensor.read(), local.block_tensors(last)[name].read())
    weights = manifest.file("model.safetensors")
    had = len(machine.files.store.held(weights))
    assert 0 < had < len(weights.pieces) and not (machine.files.store.snapshot / weights.name).exists()

    again = Machine(server, tmp_path / "cache", manifest)  # another start
    remote = ModelCheckpoint(again.files)
    remote.block_tensors(last)
    assert not again.asked
    for name, tensor in remote.stored(lambda _name: True).items():
        assert torch.equal(tensor.read(), local.stored(lambda _name: True)[name].read())
    assert len(again.asked) == len(weights.pieces) - had
    assert ModelCheckpoint.open(again.files.location).revision == local.revision  # a directory like any other


@pytest.mark.usefixtures("small_pieces")
def test_a_machine_with_some_pieces_offers_those(source: Path, tmp_path: Path) -> None:
    server = offered(source)
    manifest = run(manifest_of(server)).manifest
    remote = ModelCheckpoint(Machine(server, tmp_path / "cache", manifest).files)
    second = Offering(remote, None)
    offer, weights = run(manifest_of(second)), manifest.file("model.safetensors")
    header = offer.held[weights.key]
    assert second.digest == server.digest and header
    remote.block_tensors(0)
    offer = run(manifest_of(second))
    assert header < offer.held[weights.key] < set(range(len(weights.pieces)))
    index = max(offer.held[weights.key])
    assert sha256(run(joined(second.piece(CALLER, weights.pieces[index])))).digest() == weights.pieces[index]
    missing = max(set(range(len(weights.pieces))) - offer.held[weights.key])
    with pytest.raises(RequestRejected, match="does not have the piece"):
        run(joined(second.piece(CALLER, weights.pieces[missing])))


def test_a_file_that_the_members_lack_is_missing(source: Path, tmp_path: Path) -> None:
    server = offered(source)
    machine = Machine(server, tmp_path / "cache", run(manifest_of(server)).manifest)
    with pytest.raises(CheckpointError, match=r"tiny has no merges.txt in the swarm"):
        machine.files.path("merges.txt")
