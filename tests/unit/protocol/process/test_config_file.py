"""A configuration file gives flags their defaults: which, for whom, and what is said of mistakes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from swarm_protocol.process.config_file import ConfigRules, apply_config, leaves

RULES = ConfigRules({"membership": "TEST_MEMBERSHIP"}, (("blocks", "num-blocks"),))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="name")
    run = commands.add_parser("run")
    run.add_argument("--config")
    run.add_argument("--peers", nargs="+", default=[])
    run.add_argument("--num-blocks", type=int)
    run.add_argument("--blocks")
    run.add_argument("--wait", type=float, default=1.0)
    run.add_argument("--key", type=Path)
    run.add_argument("--membership", type=Path)
    run.add_argument("--level", default="low", choices=("low", "high"))
    run.add_argument("--fast", action="store_true")
    ask = commands.add_parser("ask")
    ask.add_argument("--level", default="low", choices=("low", "high"))
    ask.add_argument("--data", required=True)
    make = commands.add_parser("keys").add_subparsers(dest="action").add_parser("make")
    make.add_argument("--level", default="low")
    return parser


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """What a command line means where the user's own file says this."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    monkeypatch.delenv("TEST_MEMBERSHIP", raising=False)
    path = tmp_path / "swarm" / "config.toml"
    path.parent.mkdir()

    def parse(content: str, *argv: str, all_parsers=None) -> argparse.Namespace:
        path.write_text(content)
        parser = make_parser()
        apply_config(dict(leaves(parser)), argv, RULES, all_parsers or (lambda: dict(leaves(make_parser()))))
        return parser.parse_args(argv)

    parse.path = path
    return parse


def test_keys_at_the_top_hold_for_all_commands_and_a_table_for_its_own(parse):
    content = 'level = "high"\n[ask]\nlevel = "low"\ndata = "d"\n[keys.make]\nlevel = "other"\n'
    assert parse(content, "run").level == "high"
    assert parse(content, "ask").level == "low"
    assert parse(content, "keys", "make").level == "other"


def test_what_is_typed_comes_first(parse):
    args = parse('[run]\nlevel = "high"\npeers = ["a", "b"]\nfast = true\n', "run", "--level", "low", "--peers", "c")
    assert (args.level, args.peers, args.fast) == ("low", ["c"], True)


def test_values_are_as_argparse_would_make_them(parse):
    args = parse('[run]\npeers = ["a"]\nnum-blocks = 3\nwait = 2\nkey = "~/k"\nblocks = 7\n', "run")
    assert (args.peers, args.num_blocks, args.wait, args.key) == (["a"], 3, 2.0, Path.home() / "k")
    assert isinstance(args.wait, float) and args.blocks == "7"


def test_a_required_flag_may_stand_in_the_file(parse):
    assert parse('[ask]\ndata = "d"\n', "ask").data == "d"
    with pytest.raises(SystemExit):
        parse("", "ask")


@pytest.mark.parametrize("flag", ["--blocks", "--bl"])
def test_a_flag_that_is_typed_replaces_those_it_excludes(parse, flag: str):
    args = parse("[run]\nnum-blocks = 3\n", "run", f"{flag}=0:2")
    assert (args.blocks, args.num_blocks) == ("0:2", None)


def test_a_flag_is_not_taken_for_the_abbreviation_of_another(parse):
    parser = make_parser()
    run = dict(leaves(parser))["run",]
    run.add_argument("--block", type=int)
    parse.path.write_text("[run]\nnum-blocks = 3\n")
    apply_config({("run",): run}, ["run", "--block", "1"], RULES)
    assert run.parse_args(["--block", "1"]).num_blocks == 3


def test_the_environment_comes_before_the_file(parse, monkeypatch):
    assert parse('membership = "m"\n', "run").membership == Path("m")
    monkeypatch.setenv("TEST_MEMBERSHIP", "x")
    assert parse('membership = "m"\n', "run").membership is None


def test_which_file(parse, tmp_path, monkeypatch):
    other, third = tmp_path / "other.toml", tmp_path / "third.toml"
    other.write_text("[run]\nwait = 5\n")
    third.write_text("[run]\nwait = 6\n")
    own = "[run]\nwait = 4\n"
    assert parse(own, "run").wait == 4
    assert parse(own, "run", "--config", "none").wait == 1
    assert parse(own, "run", "--config", str(other)).wait == 5
    monkeypatch.setenv("SWARM_CONFIG", str(third))
    assert parse(own, "run").wait == 6
    assert parse(own, "run", f"--config={other}").wait == 5
    assert parse(own, "run", "--conf", str(other)).wait == parse(own, "run", f"--c={other}").wait == 5
    monkeypatch.setenv("SWARM_CONFIG", "none")
    assert parse(own, "run").wait == 1
    with pytest.raises(ValueError, match=r"nowhere is no file: expected one in TOML, or --config none"):
        parse(own, "run", "--config", "/nowhere")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("levle = 'high'", "there is no flag 'levle': did you mean 'level'?"),
        ("[run]\nnum_blocks = 3", "there is no flag 'num_blocks' for [run]: did you mean 'num-blocks'?"),
        ("[ask]\nfast = true", "there is no flag 'fast' for [ask]"),
        ("[rnu]\nwait = 3", "there is no command [rnu]: did you mean 'run'?"),
        ("[keys.mkae]\nlevel = 'x'", "there is no command [keys.mkae]: did you mean 'keys.make'?"),
        ("config = 'x'", "there is no flag 'config'"),
        ("[run]\nnum-blocks = '3'", "run.num-blocks is '3': expected a whole number"),
        ("[run]\nnum-blocks = true", "run.num-blocks is True: expected a whole number"),
        ("wait = 'long'", "wait is 'long': expected a number"),
        ("[run]\nfast = 1", "run.fast is 1: expected true or false"),
        ("[run]\npeers = 'a'", "run.peers is 'a': expected a list, as in ['a']"),
        ("[run]\nkey = 1", "run.key is 1: expected the path of a file, in quotes"),
        ("[run]\nblocks = [1]", "run.blocks is [1]: expected text in quotes"),
        ("level = 'middling'", "level is 'middling': expected low, high"),
    ],
)
def test_mistakes_are_named_with_the_file_and_what_was_expected(parse, content, sentence):
    with pytest.raises(ValueError) as error:
        parse(content, "run")
    assert str(error.value) == f"{parse.path}: {sentence}"


def test_a_file_that_is_no_toml(parse):
    with pytest.raises(ValueError, match=r"cannot be read: .*line 1"):
        parse("= 3", "run")
    parse.path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        apply_config({}, ["run"])


def test_keys_of_other_commands_are_no_mistakes(parse):
    others = {("serve",): argparse.ArgumentParser()}
    others["serve",].add_argument("--port", type=int)
    known = lambda: {**dict(leaves(make_parser())), **others}  # noqa: E731
    assert parse("port = 1\n[serve]\nport = 2\n", "run", all_parsers=known).wait == 1
    parser = make_parser()
    apply_config(dict(leaves(parser)), ["run"])  # nobody to ask: passed over
