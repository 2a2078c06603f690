"""Members of a group see each other in the DHT; whoever lacks the secret sees nobody, and is seen by nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from swarm_protocol.dht.notices.group_candidates import CandidateRegistry
from swarm_protocol.dht.records import GroupCandidate
from swarm_protocol.dht.stored_records import subkey_of
from tests.worlds.identities import identity

SECRET, OTHER_SECRET = bytes(32), bytes(range(32))


class StoredItems:
    """A DHT node that stores items by key and subkey."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}

    async def store(self, key: str, value: bytes, expires_at: float, subkey: str) -> bool:
        self.items.setdefault(key, {})[subkey] = SimpleNamespace(value=value, expiration_time=expires_at)
        return True

    async def get(self, key: str, latest: bool) -> Any:
        return SimpleNamespace(value=self.items[key]) if key in self.items else None


def test_only_who_has_the_secret_sees_the_candidates() -> None:
    node = StoredItems()

    def registry(number: int, secret: bytes = SECRET, group: str = "lab") -> CandidateRegistry:
        return CandidateRegistry(lambda: node, "swarm", identity(number), b"token", group, secret)

    def candidates(of: CandidateRegistry) -> list[GroupCandidate]:
        return sorted(asyncio.run(of.read()), key=lambda candidate: candidate.name)

    first, second = GroupCandidate("a", "10.0.0.1:1", leads=False), GroupCandidate("b", "10.0.0.2:1", leads=True)
    assert asyncio.run(registry(0).publish(first)) and asyncio.run(registry(1).publish(second))
    assert candidates(registry(2)) == [first, second]
    assert candidates(registry(2, OTHER_SECRET)) == candidates(registry(2, group="other")) == []
    assert b"10.0.0" not in b"".join(item.value for items in node.items.values() for item in items.values())
    (items,) = node.items.values()
    stranger = subkey_of(identity(2))
    items[stranger] = items[subkey_of(identity(0))]  # what somebody else has sealed
    items[subkey_of(identity(0))] = SimpleNamespace(value=b"\xff", expiration_time=0.0)
    assert candidates(registry(2)) == [second]
