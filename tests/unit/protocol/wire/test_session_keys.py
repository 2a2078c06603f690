"""A session's push key is another than its own, and always the same."""

from __future__ import annotations

from swarm_protocol.wire.session_keys import new_session_key, push_key_of


def test_each_session_has_two_keys_of_its_own() -> None:
    keys = [new_session_key() for _ in range(3)]
    all_keys = {*keys, *map(push_key_of, keys), *(push_key_of(push_key_of(key)) for key in keys)}
    assert len(all_keys) == 9 and all(len(key) >= 16 for key in all_keys)
    assert push_key_of(keys[0]) == push_key_of(bytes(keys[0]))
