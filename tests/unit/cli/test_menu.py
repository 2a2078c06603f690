"""The menu of ``swarm``, as somebody types in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm_cli import entry, menu
from swarm_cli.command_line import make_parser
from swarm_cli.menu import choose
from swarm_cli.parsers import whole_parser
from swarm_protocol.process.config_file import leaves

PEER = "/ip4/192.168.1.10/tcp/31337/p2p/QmWuXJM1v3RHh9tF3Sy7Xrrn2zvhDQQpuBLRU7QLR5PaMd"


def typing(*answers: str) -> Callable[[str], str]:
    """A reader of these lines, and then of the end of the input."""
    lines = iter(answers)

    def ask(_prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    return ask


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (("1", ""), ["up"]),
        (("1", "smollm2"), ["up", "--model", "smollm2"]),
        (("2", "", ""), ["server"]),
        (("2", "owner/model", "192.168.1.10"), ["server", "--model", "owner/model", "--host", "192.168.1.10"]),
        (("3", PEER), ["server", "--initial-peers", PEER]),
        (("4", ""), ["chat"]),
        (("5",), ["status"]),
        (("6",), ["--help"]),
        (("q",), []),
    ],
)
def test_each_line_is_a_command_that_is_said(answers: tuple[str, ...], words: list[str]) -> None:
    said: list[str] = []
    assert choose(typing(*answers), said.append) == words
    assert (said[-1] == f"$ swarm {' '.join(words)}") is bool(words)
    if words and words != ["--help"]:
        parsers = {name: parser for (name, *_), parser in leaves(whole_parser())}
        parsers[words[0]].parse_args(words[1:])  # exits if a flag is not known


def test_wrong_answers_are_asked_for_again() -> None:
    said: list[str] = []
    assert choose(typing("", "7", "chat", " 3 ", "", "localhost:31337", PEER), said.append)[-1] == PEER
    assert said.count("there is no '7' here: expected a number from 1 to 6, or q") == 1
    assert sum("is no multiaddr of a peer" in line for line in said) == 2
    assert choose(typing("1", "./nowhere", "smollm2"), said.append) == ["up", "--model", "smollm2"]
    assert "./nowhere does not exist" in said


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """``swarm`` without a word, on a terminal; the arguments of the command lines that it runs."""
    ran: list[list[str]] = []
    monkeypatch.setattr("sys.argv", ["/usr/bin/swarm"])
    monkeypatch.setattr(entry, "_is_at_terminal", lambda: True)
    monkeypatch.setattr("swarm_cli.command_line.main", lambda argv, *_: ran.append(argv))
    return ran


def test_the_chosen_command_is_run(terminal: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(menu, "choose", lambda: ["status"])
    entry.main()
    assert terminal == [["status"]]


@pytest.mark.parametrize(("end", "code"), [(EOFError, 0), (KeyboardInterrupt, 130)])
def test_the_end_of_the_input_and_ctrl_c_leave(
    terminal: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: type[BaseException],
    code: int,
) -> None:
    def choose() -> list[str]:
        raise end

    monkeypatch.setattr(menu, "choose", choose)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == code and terminal == []
    assert capsys.readouterr().err == ""


def test_without_a_terminal_there_is_help(terminal: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_is_at_terminal", lambda: False)
    monkeypatch.setattr(menu, "choose", lambda: pytest.fail("a menu was shown"))
    entry.main()
    assert terminal == [[]]  # which prints the help
    assert " up " in make_parser().format_help()
