"""What a client cannot be told."""

from __future__ import annotations

from dataclasses import fields

import pytest

from swarm_client.core.config import ClientConfig, Timeouts


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"recovery_timeout_s": -1}, "recovery_timeout_s is -1: expected a number of seconds"),
        ({"recovery_timeout_s": "soon"}, "recovery_timeout_s is 'soon': expected a number of seconds"),
        ({"wait_timeout_s": float("nan")}, "wait_timeout_s is nan: expected a number of seconds"),
        ({"step_timeout_s": None}, "step_timeout_s is None: expected a number of seconds"),
        ({"timeouts": 3}, "timeouts is 3: expected Timeouts(connect_s=…, …)"),
        ({"on_event": 3}, "on_event is 3: expected a function of one event"),
        ({"compression": "zip"}, "compression 'zip' is unknown: expected auto, raw, bf16, int8, int4"),
        ({"weights": "abc"}, "weights 'abc' is no SHA-256 of a manifest: expected 64 digits from 0 to f"),
        ({"initial_peers": "/ip4/1"}, "initial_peers is a string: expected a list of multiaddrs"),
        (
            {"initial_peers": ("localhost:1",)},
            "initial peer 'localhost:1' is no multiaddr of a peer: expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, "
            "as a server prints it after `peer=`",
        ),
    ],
)
def test_a_sentence_says_what_was_expected(fields, sentence):
    with pytest.raises(ValueError) as caught:
        ClientConfig(**fields)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("field", fields(Timeouts), ids=lambda field: field.name)
@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), None, "soon"])
def test_a_timeout_is_a_number_of_seconds(field, seconds):
    with pytest.raises(ValueError, match=f"timeouts.{field.name} is {seconds!r}: expected a number of seconds"):
        Timeouts(**{field.name: seconds})
