"""JSON from strangers: objects of bounded size and depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import MAX_DEPTH, is_shallow, read_object, shown


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


WRONG = {
    "nothing": (b"", "is no valid JSON"),
    "half": (b'{"a": 1', "is no valid JSON"),
    "other bytes": (b"\xff\xfe\x00", "is no valid JSON"),
    "a list": (b"[1, 2]", "holds a JSON list, expected an object"),
    "a number": (b"1", "holds a JSON int, expected an object"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", "is no valid JSON: Exceeds the limit"),
    "very deep lists": (b"[" * 100_000, "is no valid JSON: it is nested too deeply"),
    "very deep objects": (b'{"a":' * 100_000, "is no valid JSON: it is nested too deeply"),
    "a level too much": (nested(MAX_DEPTH + 2).encode(), "is nested too deeply: expected at most 32 levels of JSON"),
    "too much": (b'{"a": "' + b"b" * 1000 + b'"}', "is too large: expected at most 900 bytes of JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    content, sentence = WRONG[name]
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"some\.json {sentence}"):
        read_object(tmp_path / "some.json", 900 if name == "too much" else 1 << 20)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: (No such file|Is a directory)"):
        read_object(tmp_path / name)


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text('{"a": [1, {"b": "é"}]}', encoding="utf-8")
    assert read_object(tmp_path / "some.json") == {"a": [1, {"b": "é"}]}


def test_depth() -> None:
    assert is_shallow(1, 0) and is_shallow({}, 0) and is_shallow({"a": 1, "b": []}, 1)
    assert not is_shallow([[]], 0)
    assert is_shallow(json.loads(nested(5)), 4) and not is_shallow(json.loads(nested(5)), 3)


def test_a_wrong_value_is_shown_in_one_line_of_bounded_length() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 1000)) == 61
