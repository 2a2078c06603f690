"""Dependencies between packages point one way, rooms are layered, and policies are pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES = 10  # of a room
PACKAGES = {  # what each may import of the others
    "swarm_protocol": set(),
    "swarm_models": {"swarm_protocol"},
    "swarm_server": {"swarm_protocol", "swarm_models"},
    "swarm_client": {"swarm_protocol", "swarm_models"},
    "swarm_training": {"swarm_protocol", "swarm_models"},
    "swarm_training.experts": {"swarm_protocol", "swarm_models"},
    "swarm_training.stages": {"swarm_protocol", "swarm_models", "swarm_server", "swarm_training"},
    "swarm_gateway": {"swarm_protocol", "swarm_models", "swarm_client"},
    "swarm_cli": {
        *("swarm_protocol", "swarm_models", "swarm_server", "swarm_client", "swarm_gateway"),
        *("swarm_training", "swarm_training.stages", "swarm_training.experts"),
    },
}
ACROSS = {  # of packages that must not know each other
    ("swarm_server/__main__.py", "swarm_training.stages.front"),  # `--train`, as the console script has it too
    ("swarm_client/__main__.py", "swarm_cli.command_line"),  # `python -m swarm_client` is `swarm` without the server
}
DOOR = "door"  # the modules of a package that are in no room: its command line, and what `import` of it gives
LAYERS = {  # from the top: a room imports from those below it only, which are further right
    "swarm_protocol": (
        "door > verification > tunnel > streams > dht rpc > access > net > process > wire untrusted imports "
        "telemetry > codecs > errors > span pb atomic_file backoff file_lock config_flags failures system"
    ),
    "swarm_models": "door > sharing > quantization > gpu checkpoints > kernels > quants activation_limit out_of_memory",
    "swarm_client": (
        "door > generation > batching > model > drafts > speculation > sessions passes > weights > verification > "
        "swarm > transport > core routing failover adapters"
    ),
    "swarm_gateway": (
        "door > app > batch_api > openai_api responses_api anthropic_api ollama_api monitor_api > generation > "
        "web > answers > grammars > history > monitor limits pages"
    ),
    "swarm_cli": "door > up quantize > commands > chat demo doctor finetune keys",
    "swarm_server": (
        "door > node > metrics > rpc > verification > sessions > engine admission > training gpu queueing > "
        "graph > adapters > kv > blocks group > reach > net core > weights placement machine"
    ),
    "swarm_training": (
        "door > commands trainer > runfile > data web > reports > contract > run > net > meeting > rollback > "
        "checkpoints > evaluation > averaging > progress compression optim losses > ledger > core numerics > pb"
    ),
    "swarm_training.stages": (
        "door > commands > trainer > audit > rpc > peer > engine > compress routing placement resume > pb"
    ),
    "swarm_training.experts": "door > mixture server > replicas > net > directory > search > core > pb",
}
UPWARDS = {
    ("swarm_server/node/local_cluster.py", "swarm_server.command_line"),  # it runs servers as a user does
    ("swarm_client/model/hf_model.py", "swarm_client.batching.joining"),  # stock `generate` is where threads meet
}
ACYCLIC = [  # rooms whose modules import one way
    *("swarm_server/node", "swarm_server/rpc", "swarm_server/sessions"),
    *("swarm_training/averaging", "swarm_training/meeting", "swarm_training/run", "swarm_training/stages/peer"),
]
POLICIES = [
    f"{room}/{name}.py"
    for room, names in {
        "swarm_client/failover": "failover messages replay",
        "swarm_client/routing": "compression pipelining routing",
        "swarm_client/speculation": "policy",
        "swarm_client/verification": "risk votes",
        "swarm_training/experts/search": "batching beam keeping placing",
        "swarm_server/placement": "capacity device_split group_leader placement slow_follower",
        "swarm_server/queueing": "fair_queue prompt_order",
        "swarm_training/stages/routing": "barrier run_stages backlogs coverage router speed turns",
        "swarm_training/stages/placement": "stage_choice",
        "swarm_training/stages/resume": "agreement",
        "swarm_training/averaging": "chunks grid repair",
        "swarm_protocol/codecs": "bitmap",
        "swarm_training/evaluation": "policy",
        "swarm_training/meeting": "leader",
        "swarm_training/progress": "policy",
        "swarm_training/rollback": "divergence judging",
    }.items()
    for name in names.split()
]
POLICY_IMPORTS = {
    *("__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math", "numpy"),
    *("statistics", "typing"),
    *("swarm_protocol.errors", "swarm_protocol.span", "swarm_protocol.dht.records", "swarm_protocol.wire.constants"),
    "swarm_protocol.backoff",
    "swarm_protocol.codecs.sizes",
    *("hashlib", "swarm_training.experts.core.cells"),
    *("swarm_training.core.config", "swarm_training.core.moment", "swarm_training.core.record"),
    "swarm_training.pb.training_pb2",
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
            # `from swarm_protocol.wire import codec` imports swarm_protocol.wire.codec
            is_module = not is_room(node.module)
            names = [alias.name for alias in node.names]
            found += [(node.lineno, node.module if is_module else f"{node.module}.{name}") for name in names]
    return sorted(set(found))


def package_of(module: str) -> str | None:
    """The innermost package of ours that holds the module, or None."""
    holding = [package for package in PACKAGES if f"{module}.".startswith(f"{package}.")]
    return max(holding, key=len, default=None)


def is_room(module: str) -> bool:
    package = package_of(module)
    if package is None:
        return False
    room = module.removeprefix(package).removeprefix(".")
    return not room or ("." not in room and (ROOT / module.replace(".", "/") / "__init__.py").exists())


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str:
    package = package_of(module) or ""
    room = module.removeprefix(package).removeprefix(".").partition(".")[0]
    return room if room in LAYERS[package].split() else DOOR


def wrong_arrows(path: str, source: str) -> list[str]:
    """Imports of another package that must not be, and of rooms that are not below."""
    module = module_of(path)
    package = package_of(module)
    level = {room: number for number, layer in enumerate(LAYERS[package].split(">")) for room in layer.split()}
    wrong = []
    for line, name in imports(source, module):
        other = package_of(name)
        if other not in (None, package) and other not in PACKAGES[package] and (path, name) not in ACROSS:
            wrong.append(f"{path}:{line} imports {name}: {package} must not depend on {other}")
        elif other == package and name != package and (path, name) not in UPWARDS:
            ours, theirs = room_of(module), room_of(name)
            if ours != theirs and level[ours] >= level[theirs]:
                wrong.append(f"{path}:{line} imports {name}: {ours} must not depend on {theirs}")
    return wrong


def impurities(path: str, source: str, allowed: Collection[str] = POLICY_IMPORTS) -> list[str]:
    return [
        f"{path}:{line} imports {name}: a policy decides from data alone"
        for line, name in imports(source, module_of(path))
        if name not in allowed and name.split(".")[0] not in allowed
    ]


def sources(package: str) -> dict[str, str]:
    """Return the text of each module by its path, without generated code and without packages inside the package."""
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    paths = {str(path.relative_to(ROOT)): path for path in files if path.parent.name != "pb"}
    own = package_of(package.replace("/", "."))
    return {name: path.read_text() for name, path in paths.items() if package_of(module_of(name)) == own}


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_one_way(package: str) -> None:
    files = sources(package)
    assert files
    wrong = [arrow for path, source in files.items() for arrow in wrong_arrows(path, source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ACYCLIC)
def test_modules_of_a_room_import_one_way(room: str) -> None:
    modules = {module_of(path): text for path, text in sources(room).items()}
    graph = {module: [name for _, name in imports(text, module) if name in modules] for module, text in modules.items()}
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a circle


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_are_small_and_say_what_they_are_for(package: str) -> None:
    for init in (ROOT / package.replace(".", "/")).rglob("__init__.py"):
        if init.parent.name == "pb":
            continue
        assert len(list(init.parent.glob("*.py"))) <= MOST_FILES, init.parent
        docstring = ast.get_docstring(ast.parse(init.read_text()))
        assert docstring and docstring.endswith("."), init


def test_one_module_of_the_client_knows_the_errors_of_grpc() -> None:
    knowing = [path for path, source in sources("swarm_client").items() if re.search(r"StatusCode|RpcError", source)]
    assert knowing == ["swarm_client/transport/grpc_calls.py"]


def test_policies_are_loaded_without_grpc_and_torch() -> None:
    modules = [module_of(path) for path in POLICIES]
    code = f"import sys, {', '.join(modules)}; sys.exit(bool({{'grpc', 'torch'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", POLICIES)
def test_policies_are_pure(path: str) -> None:
    wrong = impurities(path, (ROOT / path).read_text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "line"),
    [
        ("swarm_client/core/a.py", "import swarm_server", 1),
        ("swarm_client/core/a.py", "import os\nfrom swarm_server.engine.engine import Engine", 2),
        ("swarm_server/engine/a.py", "def late():\n    import swarm_client.model.model as model", 2),
        ("swarm_protocol/wire/a.py", "from swarm_client.routing.routing import Hop", 1),
        ("swarm_client/swarm/a.py", "import os\nfrom swarm_client.sessions.session import RemoteSession", 2),
        ("swarm_server/kv/a.py", "from swarm_server import command_line", 1),
        ("swarm_server/kv/a.py", "if TYPE_CHECKING:\n    from swarm_server.engine.engine import Engine", 2),
        ("swarm_protocol/errors.py", "from swarm_protocol.wire.codec import encode", 1),
    ],
)
def test_a_wrong_arrow_is_named(path: str, source: str, line: int) -> None:
    (arrow,) = wrong_arrows(path, source)
    assert arrow.startswith(f"{path}:{line} imports swarm_")
    assert "must not depend on" in arrow


def test_right_arrows_are_not() -> None:
    source = (
        "import torch\nfrom swarm_protocol.span import Span\nfrom swarm_protocol.pb import swarm_pb2\nfrom . import x\n"
    )
    for package, room in (("swarm_protocol", "dht"), ("swarm_client", "core"), ("swarm_server", "kv")):
        assert wrong_arrows(f"{package}/{room}/a.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "def f():\n    from time import x",
        "from swarm_protocol.wire import codec",
        "from swarm_protocol.dht.dht import Dht",
        "from .transport import x",
    ],
)
def test_a_policy_that_imports_more_than_data_types_is_named(source: str) -> None:
    assert impurities("swarm_client/routing/routing.py", source) != []
