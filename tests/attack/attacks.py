"""The attacks that tests repeat and ``benchmarks/attack.py`` measures.

An attack is a test function of this package that takes a server under attack, asserts that it fails, and has a name::

    @attack("empty changes")
    def test_empty_changes(target: Attacked) -> None: ...

One that needs more than ``attacked`` starts says so by ``servers``, which is given a directory of its own. Benchmarks
repeat an attack on the same servers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.attack.attacked import Attacked, attacked

Servers = Callable[[Path], AbstractContextManager[Attacked]]
Run = Callable[[Any], None]  # given what its ``servers`` start
R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class Attack:
    """``run`` raises AssertionError if the server does not withstand it."""

    name: str
    run: Run
    servers: Servers


ATTACKS: dict[str, Attack] = {}


def attack(name: str, servers: Servers = attacked) -> Callable[[R], R]:
    """Makes a test function known as an attack."""

    def known(run: R) -> R:
        assert name not in ATTACKS, f"two attacks are called {name!r}"
        ATTACKS[name] = Attack(name, run, servers)
        return run

    return known
