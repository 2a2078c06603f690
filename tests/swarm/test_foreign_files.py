"""Files that strangers have made, given to the commands: one sentence, and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from tests.swarm.processes import Outcome, run_commands

SHIPPED = Path(locate(DEFAULT_MODEL))
FAILED = 1  # exit code
DEEP = "[" * 100_000
INDEX = "model.safetensors.index.json"
LORA = {"peft_type": "LORA", "target_modules": ["query_key_value"], "r": 2}


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def change(name: str, **values: Any) -> Callable[[Path], object]:
    return lambda directory: write(name, json.dumps({**json.loads((SHIPPED / name).read_text()), **values}))(directory)


def link(name: str) -> Callable[[Path], object]:
    def make(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to("/etc/hosts")

    return make


MODELS = {
    "nested": (write("config.json", DEEP), "config.json is no valid JSON: it is nested too deeply"),
    "blocks": (change("config.json", num_hidden_layers=-3), "has num_hidden_layers=-3: expected a whole number"),
    "rope": (change("config.json", rope_theta=float("inf")), "has rope_theta=inf: expected a number above 0"),
    "index": (
        write(INDEX, '{"weight_map": {"a": "../../etc/hosts"}}'),
        "names a file '../../etc/hosts': expected one in",
    ),
    "nested-index": (write(INDEX, DEEP), f"{INDEX} is no valid JSON: it is nested too deeply"),
    "link": (link("config.json"), "config.json is a link to /etc/hosts, outside"),
    "weights": (write("model.safetensors", "x" * 99), "model.safetensors is no safetensors file"),
}
ADAPTERS = {
    "nested": (DEEP, "adapter_config.json is no valid JSON: it is nested too deeply"),
    "alpha": (json.dumps({**LORA, "lora_alpha": -1}), "has lora_alpha=-1: expected a number above 0"),
    "pattern": (json.dumps({**LORA, "alpha_pattern": {r"(a)\1": 2}}), "that cannot be used"),
    "type": (json.dumps({"peft_type": {}}), "is of PEFT's type {}: expected LORA"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    root = tmp_path_factory.mktemp("foreign")
    server: dict[tuple[str, str], list[str]] = {}
    client: dict[tuple[str, str], list[str]] = {}
    for name, (damage, _) in MODELS.items():
        directory = root / "models" / name
        shutil.copytree(SHIPPED, directory)
        damage(directory)
        server["server", name] = ["--model", str(directory)]
        client["generate", name] = ["generate", "x", "--model", str(directory)]
        client["chat", name] = ["chat", "--model", str(directory)]
    for name, (config, _) in ADAPTERS.items():
        directory = root / "adapters" / name
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(config)
        server["adapter", name] = ["--adapters", str(directory)]
    found = {}
    for package, commands in (("swarm_server", server), ("swarm_client", client)):
        cache = tmp_path_factory.mktemp("user")
        found |= zip(commands, run_commands(package, list(commands.values()), cache), strict=True)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("command", ["server", "generate", "chat"])
def test_models(outcomes, command, name):
    outcomes[command, name].assert_one_sentence(MODELS[name][1], FAILED)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_a_server(outcomes, name):
    # without weights, since none is read before the config is found to be in order
    outcomes["adapter", name].assert_one_sentence(ADAPTERS[name][1], FAILED)
