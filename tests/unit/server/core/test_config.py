"""Sizes of memory, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_protocol.size import parse_size
from swarm_server.core.config import ServerConfig


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("7B", 7),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        (" 2 gib ", 2 << 30),
        ("2G", 2 << 30),
        ("1.5G", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "two", "-1G", "1e9", "1,5G", "1.G", ".5G", "1 G B", "2XB", "2Gib4", "nan", "9" * 400],
    ids=lambda text: text[:9],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value) == (
        f"size {text!r} is not understood: expected a number with a unit, such as 2GiB or 500MB"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(quant="nf4"), "a group computes with int8 or int4, not with quant nf4"),
        (dict(quant="fp8"), "a group computes with int8 or int4, not with quant fp8"),
        (dict(kv_quant="int8"), "a group attends with the compiled kernel: expected kv_quant none"),
        (dict(device="cuda"), "the members of a group compute on the CPU"),
        (dict(group_size=17), "group_size is 17: expected at most 16"),
        (dict(group_listen="leader:31400"), "--group-listen: expected --group-key FILE with it"),
        (dict(group_key=Path("key")), "--group-key: expected --group, --group-listen or --follow with it"),
        (
            dict(group_listen="leader", group_key=Path("key")),
            "--group-listen 'leader' is no address .* expected HOST:P",
        ),
        (dict(group_size=1, group_listen="leader:31400", group_key=Path("key")), "--group-size of at least 2 with it"),
        (dict(group_always=True), "--group-always: expected --group or --group-listen HOST:PORT with it"),
        (dict(group="lab"), "--group: expected --group-key FILE with it"),
        (
            dict(group_size=1, group="lab", group_key=Path("key")),
            "--group: expected --group-size of at least 2 with it",
        ),
        (dict(follow="leader:31400", group_key=Path("key")), "--follow is for followers: expected it without"),
        (dict(group_listen="[::]:31400", group_key=Path("key")), "is no address that others can reach"),
        (dict(group_size=1, follow="nonsense"), "--follow 'nonsense' is no address of a group's leader: expected HOST"),
        (dict(group_size=1, follow="leader:no"), "--follow 'leader:no' is no address"),
        (dict(group_size=1, follow="leader:1", group_key=Path("key"), model="swarm://m"), "a follower reads the model"),
    ],
)
def test_groups_that_cannot_be(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**{"group_size": 2, **options})
