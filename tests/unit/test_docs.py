"""What the documentation names is there: files, flags, messages, exported names, links. Needs no MkDocs."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest

import swarm_client
from swarm_cli.parsers import whole_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PACKAGES = (
    *("swarm_protocol", "swarm_models", "swarm_server", "swarm_client", "swarm_gateway", "swarm_cli"),
    *("swarm_training", "swarm_training/stages", "swarm_training/experts"),
)
OTHERS_FLAGS = {"--help", "--strict", "--logdir"}  # of argparse itself, and of tools that are not ours


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags_of(package: str) -> set[str]:
    flags = hook("flags")
    parser = flags.parser_of(package)
    parsers = [parser, *flags.commands(parser).values()]
    return {option for each in parsers for action in each._actions for option in action.option_strings}


@lru_cache
def known_flags() -> frozenset[str]:
    return frozenset().union(*map(flags_of, hook("flags").PACKAGES), OTHERS_FLAGS)


def flags_in(text: str) -> set[str]:
    """Of the package's own commands: those of ``python examples/….py``, ``git``, ``pip`` and the like are others'."""
    others = r"benchmarks/|python examples/|pip install|\b(?:git|docker|systemctl) |pytest"
    lines = [line for line in text.splitlines() if not re.search(others, line)]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", "\n".join(lines)))


@lru_cache
def parser() -> argparse.ArgumentParser:
    return whole_parser()


def commands_in(text: str) -> Iterator[list[str]]:
    """The words after ``swarm`` of each command in a block for a shell, as far as the command is written out."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.search(r"(?:^ *|&& )(swarm [a-z].*)", line):
                words = shlex.split(found[1], comments=True)[1:]
                if "…" not in words:
                    yield list(takewhile(lambda word: word not in ("&", "&&", "|", ">"), words))


@lru_cache
def messages() -> tuple[str, ...]:
    """All strings of the packages, with … for what is filled in."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name != "pb":
                found += map(_text, ast.walk(ast.parse(path.read_text())))
    return tuple(text for text in found if text)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def anchors(page: Path) -> set[str]:
    """As MkDocs names its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            yield link


def test_files_named_by_the_architecture_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", (DOCS / "architecture.md").read_text()))
    assert len(named) > 60
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


def test_the_architecture_names_every_room() -> None:
    text = (DOCS / "architecture.md").read_text()
    rooms = [
        f"{init.parent.relative_to(ROOT)}/" for package in PACKAGES for init in (ROOT / package).glob("*/__init__.py")
    ]
    packages = {f"{package}/" for package in PACKAGES}
    assert not [room for room in rooms if room not in packages and f"`{room}`" not in text]


@pytest.mark.parametrize("path", names(TEXTS))
def test_flags_exist(path: str) -> None:
    assert not flags_in((ROOT / path).read_text()) - known_flags()


@pytest.mark.parametrize("path", names(TEXTS))
def test_commands_are_understood(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands_in((ROOT / path).read_text()):
        try:
            parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"swarm {shlex.join(words)}: {capsys.readouterr().err}")


def test_commands_are_found() -> None:
    text = (
        "```sh\npip install swarm-lm\nswarm up --port \\\n 1 &  # it\nswarm serve …\nswarm chat --model a.b > file\n```"
    )
    assert list(commands_in(text)) == [["up", "--port", "1"], ["chat", "--model", "a.b"]]
    assert len([words for page in TEXTS for words in commands_in(page.read_text())]) > 60


@pytest.mark.parametrize("path", names(PAGES))
def test_a_page_begins_with_what_its_reader_will_have(path: str) -> None:
    first = (ROOT / path).read_text().split("\n\n")[1]
    assert first.startswith(("At the end of this page, ", "On this page, you find ")), first


def test_every_flag_has_a_row_in_its_table() -> None:
    flags = hook("flags")
    page = flags.on_page_markdown((DOCS / "reference" / "commands.md").read_text())
    assert not [flag for flag in known_flags() - OTHERS_FLAGS if f"`{flag}" not in page and flag != "-h"]
    assert "{{" not in page


def test_the_page_of_the_run_file_has_the_example() -> None:
    page = hook("flags").on_page_markdown((DOCS / "reference" / "run-file.md").read_text())
    assert "[averaging]\n# codec" in page
    assert "{{" not in page


@pytest.mark.parametrize("path", names(TEXTS))
def test_links_resolve(path: str) -> None:
    assert not list(broken_links(ROOT / path))


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert not [path for path in PAGES if f": {path.relative_to(DOCS)}\n" not in config]


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 60
    missing = [
        (message, part)
        for message in quoted
        for part in map(str.strip, message.split("…"))
        if len(part) > 3 and not any(part in text for text in messages())
    ]
    assert not missing


def test_every_exported_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert not [name for name in swarm_client.__all__ if name not in pages]
