"""Which members are taken for members that offer files, by what they answer and how soon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_models.sharing import members
from swarm_models.sharing.manifest import HeldPieces, Manifest
from swarm_models.sharing.members import OfferingMembers
from swarm_protocol.dht.records import ServerRecord, SwarmView
from tests.unit.models.sharing.files import manifest_of, write_files
from tests.unit.support import run, server_record
from tests.worlds.virtual_time import run_virtually


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return manifest_of(write_files(tmp_path))


def offering(manifest: Manifest, stub: Any, count: int = 1) -> OfferingMembers:
    records = tuple(
        server_record(
            peer_id=f"server{index}", model=manifest.model, revision=manifest.revision, weights=manifest.digest
        )
        for index in range(count)
    )

    async def view() -> SwarmView:
        return SwarmView(records)

    return OfferingMembers(manifest.revision, view, stub)


async def answering(manifest: Manifest) -> Any:
    async def parts(_request: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(data=HeldPieces(manifest, {}).to_proto().SerializeToString())

    return SimpleNamespace(GetOffer=parts)


def test_a_manifest_is_parsed_once_and_not_on_the_loop(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = list[threading.Thread](), Manifest.parse

    def counted(data: bytes) -> Manifest:
        parsed.append(threading.current_thread())
        return parse(data)

    monkeypatch.setattr(Manifest, "parse", counted)
    found = run(offering(manifest, lambda _server: answering(manifest), count=3).find())
    assert [member.offer.manifest for member in found] == [manifest] * 3
    assert len(parsed) == 1 and parsed[0] is not threading.current_thread()


def test_an_offer_that_is_too_long_is_not_taken(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_MANIFEST_BYTES", len(manifest.data))
    assert not run(offering(manifest, lambda _server: answering(manifest)).find())


def test_a_member_that_cannot_be_reached_is_not_waited_for(manifest: Manifest) -> None:
    async def silent(_server: ServerRecord) -> Any:
        await asyncio.sleep(1e9)

    assert run_virtually(offering(manifest, silent).find(), limit_s=60.0) == []

    async def refusing(_server: ServerRecord) -> Any:
        raise ConnectionRefusedError

    assert run(offering(manifest, refusing).find()) == []
