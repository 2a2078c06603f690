"""Dependencies point one way: client → protocol ← server, and policy knows data types only."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {  # what each may import of the others
    "swarm_protocol": set(),
    "swarm_client": {"swarm_protocol"},
    "swarm_server": {"swarm_protocol"},
}
POLICIES = [
    "swarm_client/recovery.py",
    "swarm_client/routing.py",
    "swarm_server/capacity.py",
    "swarm_server/placement.py",
]
POLICY_IMPORTS = {
    *("__future__", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math", "numpy"),
    *("statistics", "typing"),
    *(f"swarm_protocol.{module}" for module in ("errors", "records", "span", "wire")),
    *(path.removesuffix(".py").replace("/", ".") for path in POLICIES),
}


def imports(source: str, module: str) -> list[tuple[int, str]]:
    """Line and full name of every module that the source imports, in functions and `if TYPE_CHECKING` too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = module.split(".")[: -node.level]
            found.append((node.lineno, ".".join([*package, node.module] if node.module else package)))
        elif isinstance(node, ast.ImportFrom):
            names = [
                alias.name for alias in node.names
            ]  # `from swarm_protocol import codec` imports swarm_protocol.codec
            whole = node.module not in PACKAGES
            found += [(node.lineno, node.module if whole else f"{node.module}.{name}") for name in names]
    return sorted(set(found))


def wrong_arrows(path: str, source: str) -> list[str]:
    package = path.split("/")[0]
    module = path.removesuffix(".py").replace("/", ".")
    forbidden = PACKAGES.keys() - PACKAGES[package] - {package}
    return [
        f"{path}:{line} imports {name}: {package} must not depend on {name.split('.')[0]}"
        for line, name in imports(source, module)
        if name.split(".")[0] in forbidden
    ]


def impurities(path: str, source: str, allowed: Collection[str] = POLICY_IMPORTS) -> list[str]:
    module = path.removesuffix(".py").replace("/", ".")
    return [
        f"{path}:{line} imports {name}: a policy decides from data alone"
        for line, name in imports(source, module)
        if name not in allowed and name.split(".")[0] not in allowed
    ]


def sources(package: str) -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / package).rglob("*.py"))}


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_one_way(package: str) -> None:
    files = sources(package)
    assert len(files) > 5
    wrong = [arrow for path, source in files.items() for arrow in wrong_arrows(path, source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", POLICIES)
def test_policies_are_pure(path: str) -> None:
    wrong = impurities(path, (ROOT / path).read_text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "line"),
    [
        ("swarm_client/a.py", "import swarm_server", 1),
        ("swarm_client/a.py", "import os\nfrom swarm_server.engine import Engine", 2),
        ("swarm_server/sub/a.py", "def late():\n    import swarm_client.model as model", 2),
        ("swarm_server/a.py", "if TYPE_CHECKING:\n    from swarm_client import model", 2),
        ("swarm_protocol/a.py", "from swarm_server import blocks", 1),
        ("swarm_protocol/a.py", "from swarm_client.routing import Hop", 1),
    ],
)
def test_a_wrong_arrow_is_named(path: str, source: str, line: int) -> None:
    (arrow,) = wrong_arrows(path, source)
    assert arrow.startswith(f"{path}:{line} imports swarm_")
    assert "must not depend on" in arrow


def test_right_arrows_are_not() -> None:
    source = "import torch\nfrom swarm_protocol.span import Span\nfrom swarm_protocol import pb\nfrom . import x\n"
    for package in PACKAGES:
        assert wrong_arrows(f"{package}/a.py", source) == []


@pytest.mark.parametrize("name", ["torch", "asyncio", "time", "socket", "grpc", "random", "os"])
def test_a_policy_with_effects_is_named(name: str) -> None:
    assert impurities("swarm_client/routing.py", f"import {name}") != []
    assert impurities("swarm_client/routing.py", f"def f():\n    from {name} import x") != []


@pytest.mark.parametrize(
    "source",
    [
        "from swarm_protocol import codec",
        "from swarm_protocol.dht import Dht",
        "from .transport import x",
        "from . import y",
    ],
)
def test_a_policy_that_imports_more_than_data_types_is_named(source: str) -> None:
    assert impurities("swarm_client/routing.py", source) != []
