"""``swarm config``, and the user's file as every command reads it."""

from __future__ import annotations

import pytest

from swarm_cli.command_line import parse_args as client
from swarm_cli.config import main
from swarm_cli.parsers import all_parsers
from swarm_server.command_line import parse_args as server
from swarm_training.command_line import parse_args as train
from tests.unit.support import refusal

CONTENT = 'swarm = "mine"\nlog-format = "json"\n[server]\nport = 31000\n[train.join]\nbatch-size = "auto"\n'


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text(CONTENT)
    monkeypatch.setenv("SWARM_CONFIG", str(path))
    monkeypatch.setenv("COLUMNS", "200")
    return path


def test_it_holds_for_every_package():
    args = client(["status"], {}, all_parsers)
    assert (args.swarm, args.log_format) == ("mine", "json")
    args = server([], all_parsers)
    assert (args.swarm, args.port, args.log_format) == ("mine", 31000, "json")
    assert train(["join", "run.toml"], all_parsers=all_parsers).batch_size == "auto"
    assert client(["status"]).swarm == "mine"  # without knowing what the others have


def test_what_is_in_force_is_shown(path, capsys):
    main([])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [str(path)]
    assert ["server", "--port", "31000", "[server]"] in lines
    assert ["train", "join", "--batch-size", "auto", "[train.join]"] in lines
    assert ["status", "--swarm", "mine", "top", "of", "the", "file"] in lines
    main(["server"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["--port", "31000", "[server]"] in lines and ["--dht-port", "0", "default"] in lines


@pytest.mark.parametrize(
    ("content", "argv", "sentence"),
    [("[sever]\nport = 1\n", [], "there is no command [sever]: did you mean 'server'?"), ("", ["fly"], "'fly'")],
)
def test_mistakes(path, capsys, content, argv, sentence):
    path.write_text(content)
    assert sentence in refusal(capsys, lambda: main(argv))


def test_blocks_that_are_typed_replace_their_number_in_the_file(path):
    path.write_text("[server]\nnum-blocks = 10\ncache-tokens = 5\n")
    args = server(["--blocks", "0:2", "--cache-memory", "1GiB"], all_parsers)
    assert (args.blocks, args.num_blocks, args.cache_tokens) == ("0:2", None, None)
    args = server(["--port", "0"], all_parsers)
    assert (args.num_blocks, args.cache_tokens) == (10, 5)
