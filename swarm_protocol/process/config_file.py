"""The configuration file, ``~/.config/swarm/config.toml``, whose keys are flags of commands.

A key at the top applies to all commands that have this flag. A table applies to the command of the same name:
``[server]``, ``[chat]``, ``[train.join]``. Typed flags and environment variables take precedence over the file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import platformdirs

ENVIRONMENT, NONE = "SWARM_CONFIG", "none"
_NO_KEYS = {"help", "version", "config"}
_EXPECTED = {int: "a whole number", float: "a number", Path: "the path of a file, in quotes", None: "text in quotes"}
Name = tuple[str, ...]  # the words of a command: ("keys", "grant")
Parsers = Mapping[Name, argparse.ArgumentParser]


@dataclass(frozen=True)
class FlagValue:
    """The file's value for one flag of one command.

    Attributes:
        value: the value as ``argparse`` would store it.
        table: the table that holds the key; empty: the top.
    """

    action: argparse.Action
    value: Any
    table: Name


@dataclass(frozen=True)
class ConfigRules:
    """A package's rules for its flags in the file.

    Attributes:
        environment: by key, the variable that takes precedence over the key.
        exclusive: groups of keys that replace each other: a typed flag replaces the file's other keys of its group.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    exclusive: tuple[Collection[str], ...] = ()


def default_path() -> Path:
    return platformdirs.user_config_path("swarm") / "config.toml"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"whose keys are flags, instead of the user's own; {NONE}: no file. {ENVIRONMENT} says the same",
    )


def config_path(argv: Sequence[str]) -> Path | None:
    """Return the file to use for this command line; None if there is none, or the user wants none.

    Raises:
        ValueError: the user named a file that does not exist.
    """
    asked = _typed_path(argv) or os.environ.get(ENVIRONMENT, "")
    if asked == NONE:
        return None
    path = Path(asked).expanduser() if asked else default_path()
    if path.is_file():
        return path
    if asked:
        raise ValueError(f"the configuration {path} is no file: expected one in TOML, or --config {NONE}")
    return None


def _typed_path(argv: Sequence[str]) -> str:
    found, words = "", iter(argv)
    for word in words:
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if len(name) > len("--") and "--config".startswith(name):  # argparse takes abbreviations: --conf FILE
            found = value if equals else next(words, "")
    return found


def apply_config(
    parsers: Parsers,
    argv: Sequence[str],
    rules: ConfigRules = ConfigRules(),
    all_parsers: Callable[[], Parsers] | None = None,
) -> None:
    """Make the file's values the defaults of the parsers.

    Args:
        parsers: the parsers to change, by command.
        all_parsers: returns the parsers of all commands, so that other commands' keys are not reported. Without it,
            top-level keys and tables that match none of ``parsers`` are ignored.

    Raises:
        ValueError: the file cannot be read, has unknown keys, or has a value of a wrong type.
    """
    path = config_path(argv)
    if path is None:
        return
    for name, settings in read_config_file(path, parsers, all_parsers).items():
        for key, setting in settings.items():
            variable = rules.environment.get(key)
            if (variable and os.environ.get(variable)) or _replaced(key, parsers[name], argv, rules):
                continue
            parsers[name].set_defaults(**{setting.action.dest: setting.value})
            setting.action.required = False  # argparse asks for a required flag even if it has a default


def _replaced(key: str, parser: argparse.ArgumentParser, argv: Sequence[str], rules: ConfigRules) -> bool:
    """Return whether a typed flag of the same exclusive group replaces the key."""
    words = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", argv) if word.startswith("--")}
    typed = {_spelled_out(word, parser).removeprefix("--") for word in words}
    return any(key in group and typed & (set(group) - {key}) for group in rules.exclusive)


def _spelled_out(word: str, parser: argparse.ArgumentParser) -> str:
    """Return the flag that argparse takes the word for, which may be an abbreviation."""
    flags = parser._option_string_actions
    return word if word in flags else next((flag for flag in flags if flag.startswith(word)), word)


def leaves(parser: argparse.ArgumentParser, name: Name = ()) -> Iterator[tuple[Name, argparse.ArgumentParser]]:
    """Yield the parsers of commands that have no subcommands.

    Args:
        name: the words of the parser's command; empty for the main parser.
    """
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, each in action.choices.items():
            yield from leaves(each, (*name, word))


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the flags that can be in the file, by their keys."""
    found = {}
    for action in parser._actions:
        if action.option_strings and isinstance(action, argparse._StoreAction | argparse._StoreTrueAction):
            found[max(action.option_strings, key=len).removeprefix("--")] = action
    return {key: action for key, action in found.items() if key not in _NO_KEYS}


def read_config_file(
    path: Path, parsers: Parsers, all_parsers: Callable[[], Parsers] | None = None
) -> dict[Name, dict[str, FlagValue]]:
    """Return the file's settings for each of these commands, by key. Raises ValueError, see ``apply_config``."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # includes TOMLDecodeError and UnicodeDecodeError
        raise ValueError(f"the configuration {path} cannot be read: {error}") from None
    return _Reader(path, parsers, all_parsers).read(content)


class _Reader:
    """A reader of one file, for some commands."""

    def __init__(self, path: Path, parsers: Parsers, all_parsers: Callable[[], Parsers] | None) -> None:
        self._path, self._parsers, self._all = path, parsers, all_parsers
        self._found: dict[Name, dict[str, FlagValue]] = {name: {} for name in parsers}

    def read(self, content: Mapping[str, Any]) -> dict[Name, dict[str, FlagValue]]:
        self._read_table((), content)
        return self._found

    def _read_table(self, table: Name, content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            if not isinstance(value, dict):
                self._read_key(table, key, value)
        for key, value in content.items():  # after the keys, because those apply to more commands
            if isinstance(value, dict):
                self._enter((*table, key), value)

    def _enter(self, table: Name, content: Mapping[str, Any]) -> None:
        if _within(self._parsers, table):
            self._read_table(table, content)
        elif self._all is not None and not _within(self._all(), table):
            names = {".".join(name[: len(table)]) for name in self._all() if len(name) >= len(table)}
            raise ValueError(f"{self._path}: there is no command [{'.'.join(table)}]{_nearest('.'.join(table), names)}")

    def _read_key(self, table: Name, key: str, value: Any) -> None:
        having = {name: flags[key] for name, flags in self._flags(self._parsers, table).items() if key in flags}
        for name, action in having.items():
            self._found[name][key] = FlagValue(action, self._checked(table, key, value, action), table)
        if having or (not table and self._all is None):
            return
        # The key may be a flag of another command in this table. Building all parsers takes long, so it is done last.
        flags = self._flags(self._parsers if self._all is None else self._all(), table)
        known = {known for each in flags.values() for known in each}
        if key not in known:
            where = f" for [{'.'.join(table)}]" if table else ""
            raise ValueError(f"{self._path}: there is no flag {key!r}{where}{_nearest(key, known)}")

    def _flags(self, parsers: Parsers, table: Name) -> dict[Name, dict[str, argparse.Action]]:
        return {name: flags_of(parser) for name, parser in _within(parsers, table).items()}

    def _checked(self, table: Name, key: str, value: Any, action: argparse.Action) -> Any:
        """Return the value as ``argparse`` would store it."""
        wrong = f"{self._path}: {'.'.join((*table, key))} is {value!r}"
        if isinstance(action, argparse._StoreTrueAction):
            if not isinstance(value, bool):
                raise ValueError(f"{wrong}: expected true or false")
            return value
        if action.nargs != "+":
            return _converted(value, action, wrong)
        if not isinstance(value, list):
            raise ValueError(f"{wrong}: expected a list, as in [{value!r}]")
        return [_converted(each, action, wrong) for each in value]


def _within(parsers: Parsers, table: Name) -> Parsers:
    return {name: parser for name, parser in parsers.items() if name[: len(table)] == table}


def _converted(value: Any, action: argparse.Action, wrong: str) -> Any:
    kind: Any = action.type  # None: text, and numbers without quotes are taken as their text
    fits = {int: (int,), float: (int, float), Path: (str,)}.get(kind, (str, int, float))
    if not isinstance(value, fits) or isinstance(value, bool):  # a bool is an int in Python
        raise ValueError(f"{wrong}: expected {_EXPECTED.get(kind, _EXPECTED[None])}")
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{wrong}: expected {', '.join(map(str, action.choices))}")
    return Path(str(value)).expanduser() if kind is Path else (kind or str)(value)


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f": did you mean {near[0]!r}?" if near else ""
