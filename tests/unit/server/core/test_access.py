"""What a server of a private swarm keeps of the revocations it has heard of."""

from __future__ import annotations

import time

import pytest

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import ID_BYTES, Revocation
from swarm_server.core.access import KnownRevocations

KEY = OrganiserKey.generate()


def test_revocations_outlive_the_server(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "swarm" / "revocations" / str(KEY.public)
    access = AccessControl(KEY.public)
    known = KnownRevocations(access)
    known.save()
    assert not path.exists()  # there are none
    for number in range(2):
        grant_id = bytes([number]) * ID_BYTES
        assert access.revoke(Revocation(KEY.public, grant_id, time.time() + 1000).signed(KEY))
        known.save()
        restarted = AccessControl(KEY.public)
        KnownRevocations(restarted).load()
        assert restarted.revocations() == access.revocations() and grant_id in restarted.revocations()
    path.write_bytes(b"!!\n" + path.read_bytes()[:-9] + b"\xff")
    damaged = AccessControl(KEY.public)
    KnownRevocations(damaged).load()
    assert len(damaged.revocations()) == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]
