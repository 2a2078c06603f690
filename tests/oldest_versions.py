"""Prints constraints for pip: the oldest version of each package that ``pyproject.toml`` allows, but for torch."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("finetune", "discover", "metrics", "serve")  # what users install; tests may need newer tools


def oldest(requirements: list[str]) -> Iterator[str]:
    """Yield ``peft>=0.18,<0.19`` for ``peft>=0.18``: the newest patch of the oldest release."""
    for requirement in map(Requirement, requirements):
        for bound in requirement.specifier:
            if bound.operator == ">=" and requirement.name != "torch":
                *major, last = map(int, bound.version.split("."))
                yield f"{requirement.name}>={bound.version},<{'.'.join(map(str, [*major, last + 1]))}"


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    print("\n".join(oldest([*project["dependencies"], *(line for name in EXTRAS for line in extras[name])])))


if __name__ == "__main__":
    main()
