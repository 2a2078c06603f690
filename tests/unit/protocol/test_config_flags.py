"""Flags take their types and defaults from a configuration class, and what is typed becomes its fields."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm_protocol.config_flags import ConfigFlags, Flag


@dataclass(frozen=True)
class Config:
    model: str
    port: int = 8000
    share: float | None = None
    file: Path | None = None
    wait_timeout_s: float = 30.0
    peers: tuple[str, ...] = ()
    is_open: bool = False
    cache_bytes: int = 2 << 10


def size(text: str) -> int:
    if not text.endswith("KiB"):
        raise ValueError(f"{text} is no size")
    return int(text.removesuffix("KiB")) << 10


FLAGS = ConfigFlags(
    Config,
    *map(Flag, ["model", "port", "share", "file", "wait_timeout_s", "peers", "is_open"]),
    Flag("cache_bytes", name="cache", default="2KiB", read=size, off=("0KiB", "none")),
)


def config(*typed: str) -> Config:
    parser = argparse.ArgumentParser(exit_on_error=False)
    FLAGS.add_to(parser)
    return Config(**FLAGS.values(parser.parse_args(["--model", "m", *typed])))


def test_without_flags_all_fields_have_their_defaults() -> None:
    assert config() == Config("m")


def test_each_flag_sets_its_field_in_the_type_of_the_field() -> None:
    typed = "--port 1 --share 0.5 --file a/b --wait-timeout 2 --peers x y --is-open --cache 4KiB"
    assert config(*typed.split()) == Config("m", 1, 0.5, Path("a/b"), 2.0, ("x", "y"), True, 4096)
    assert config("--no-cache").cache_bytes == 0


@pytest.mark.parametrize("typed", [["--port", "1.5"], ["--share", "half"]])
def test_a_word_of_another_type_is_refused_by_the_parser(typed: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError):
        config(*typed)


def test_what_a_reader_refuses_is_refused_after_parsing() -> None:
    with pytest.raises(ValueError, match="4MB is no size"):
        config("--cache", "4MB")


def test_a_field_without_a_default_has_a_required_flag(capsys) -> None:
    parser = argparse.ArgumentParser()
    FLAGS.add_to(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "--model" in capsys.readouterr().err
