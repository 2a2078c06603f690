"""Prints constraints for pip: the oldest version of each package that ``pyproject.toml`` allows, but for torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("finetune", "discover", "gguf", "metrics", "otel", "serve")  # what users install; tests may need newer tools


def oldest(requirements: Iterable[str]) -> Iterator[str]:
    """Yield ``peft>=0.20,<0.21`` for ``peft>=0.20`` and ``rich>=13,<13.1`` for ``rich>=13``: any patch will do."""
    for requirement in requirements:
        bound = re.match(r"([\w-]+)>=([\d.]+)", requirement)
        if bound and bound[1] != "torch":
            numbers = [int(number) for number in bound[2].split(".")]
            *major, last = numbers if len(numbers) > 1 else [*numbers, 0]
            yield f"{bound[1]}>={bound[2]},<{'.'.join(map(str, [*major, last + 1]))}"


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    print("\n".join(oldest([*project["dependencies"], *(line for name in EXTRAS for line in extras[name])])))


if __name__ == "__main__":
    main()
