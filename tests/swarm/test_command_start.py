"""The first second of a command: mistakes are found before anything heavy is imported, and Ctrl-C ends it quietly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.zoo import save_checkpoint

HEAVY = ["torch", "transformers", "hivemind", "huggingface_hub", "datasets"]

# Starts a command in this process.
START = """
import runpy, sys
def start(name, arguments):
    if name == "swarm":  # the console script
        from swarm_cli.entry import main
        sys.argv = ["/usr/bin/swarm", *arguments]
        main()
    else:
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
# Runs command lines one after the other in one process; says how each ended and what is imported in the end.
RUN = f"""{START}
import json
package, commands, heavy = json.loads(sys.argv[1])
codes = []
for arguments in commands:
    try:
        start(package, arguments)
    except SystemExit as end:
        codes.append(end.code)
sys.stdout.write("\\n" + json.dumps([codes, [name for name in heavy if name in sys.modules]]))
"""

# Runs a command line that gets SIGINT when a module begins to be imported.
INTERRUPTED = f"""{START}
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
module, package, *arguments = sys.argv[1:]
assert module not in sys.modules
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
start(package, arguments)
"""

# Runs a server until it is ready; says which modules have run then.
READY = """
import json, os, signal, sys
from swarm_protocol.imports.late_modules import has_run
from swarm_server.command_line import parse_args, read_config
from swarm_server.running import run
class Output:
    def write(self, text):
        if text.startswith("ready"):
            os.kill(os.getpid(), signal.SIGTERM)
    def flush(self):
        pass
heavy, *arguments = sys.argv[1:]
config = read_config(parse_args(arguments))
stdout, sys.stdout = sys.stdout, Output()
run(config)
stdout.write(json.dumps([name for name in json.loads(heavy) if has_run(name)]))
"""
# Of what torch and transformers import for things that no server does; sklearn and others may not be installed.
UNUSED = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "accelerate", "bitsandbytes"]
UNUSED += ["torch._meta_registrations", "torch._prims", "torch._decomp"]
UNUSED += ["scipy", "scipy.optimize", "sklearn", "PIL", "jinja2", "torchvision", "peft", "datasets"]


def python(script: str, *arguments: str, cache: os.PathLike[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


WRONG = {  # the first is right
    "swarm_server": [
        ["--help"],
        ["--blocks", "10:5"],
        ["--dtype", "float8"],
        ["--announce-address", "host:port"],
        ["--swarm", "a/b"],
        ["--adapters", "/nowhere/adapter"],
        ["--model", "/nowhere/model"],
        ["--identity", "/nowhere/key"],
        ["--initial-peers", "localhost:31337"],
        ["--no-such-flag"],
    ],
    "swarm_client": [
        ["--help"],
        ["generate", "x", "--head-quant", "int3"],
        ["generate", "x", "--adapter", "./nowhere"],
        ["generate", "x", "--model", "/nowhere/model"],
        ["generate", ""],
        ["finetune", "--data", "/nowhere/data.txt", "--output", "x"],
        ["status", "--swarm", "a/b"],
        ["status", "--watch", "0"],
        ["demo", "--max-new-tokens", "0"],
        ["doctor", "--port", "80000"],
        ["status", "--config", "/nowhere/config.toml"],
    ],
    "swarm": [
        ["--help"],
        ["generate", ""],
        ["chat", "hello"],
        ["server", "--quant", "int3"],
        ["serve", "--host", "0.0.0.0"],
        ["up", "--quant", "int3"],
        ["serve", "--api-keys", "/nowhere/keys"],
        ["fly"],
        ["completion", "cmd"],
        ["config", "fly"],
        ["server", "--config", "/nowhere/config.toml"],
        ["train", "watch", "run.toml", "--config", "/nowhere/config.toml"],
        ["--no-such-flag"],
    ],
}


@pytest.mark.promise("a wrong command line gets one sentence at once, and exit code 2")
@pytest.mark.parametrize("package", WRONG)
def test_what_is_wrong_is_said_before_anything_heavy_is_imported(package, tmp_path):
    result = python(RUN, json.dumps([package, WRONG[package], HEAVY]), cache=tmp_path)
    assert result.returncode == 0, result.stderr
    codes, imported = json.loads(result.stdout.splitlines()[-1])
    assert codes == [0] + [2] * (len(WRONG[package]) - 1)
    assert imported == []
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == len(codes) - 1


def run_in_one_process(package: str, *commands: list[str], cache: os.PathLike[str]) -> tuple[list[int], str, str]:
    """Their exit codes, and what they print and say."""
    result = python(RUN, json.dumps([package, commands, HEAVY]), cache=cache)
    *printed, last = result.stdout.splitlines()
    return json.loads(last)[0], "\n".join(printed), result.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "usage"),
    [
        ("swarm", ["server"], "swarm server"),
        ("swarm", ["generate"], "swarm generate"),
        ("swarm", [], "swarm"),
        ("swarm_server", [], "python -m swarm_server"),
        ("swarm_client", ["generate"], "python -m swarm_client generate"),
        ("swarm_client", [], "python -m swarm_client"),
    ],
)
def test_help_is_for_the_command_that_was_typed(package, arguments, usage, tmp_path):
    codes, printed, _ = run_in_one_process(package, [*arguments, "--help"], cache=tmp_path)
    assert codes == [0]
    assert printed.startswith(f"usage: {usage} [-h]")


@pytest.mark.parametrize("package", ["swarm", "swarm_client"])
def test_a_command_is_wanted(package, tmp_path):
    codes, printed, said = run_in_one_process(package, [], cache=tmp_path)
    assert (codes, printed) == ([2], "")
    assert said.startswith("usage: ") and " status " in said
    assert (" server " in said) == (package == "swarm")


def test_an_unknown_command_is_told_which_there_are(tmp_path):
    others = "up, generate, chat, serve, finetune, status, doctor, demo, quantize, keys"
    before = "server, train, experts, config, completion"
    for package, there_are in {"swarm": f"{before}, {others}", "swarm_client": others}.items():
        codes, _, said = run_in_one_process(package, ["fly"], cache=tmp_path)
        assert codes == [2]
        assert said == f"error: there is no command 'fly': expected {there_are}\n"


@pytest.mark.parametrize(
    ("package", "arguments"), [("swarm", []), ("swarm", ["server"]), ("swarm_client", []), ("swarm_server", [])]
)
def test_version(package, arguments, tmp_path):
    codes, printed, _ = run_in_one_process(package, [*arguments, "--version"], cache=tmp_path)
    assert (codes, printed.strip()) == ([0], f"swarm {version('swarm-lm')}")


def test_hints_are_for_the_command_that_was_typed(tmp_path):
    """That of ``python -m swarm_client`` is in the test of its mistakes."""
    _, _, said = run_in_one_process("swarm", ["status", "--swarm", "mine"], cache=tmp_path)
    assert "start a server with `swarm server --swarm mine`" in said


@pytest.mark.parametrize(
    ("package", "module"),
    [
        *(("swarm_server", module) for module in ("argparse", "swarm_protocol.errors", "torch", "transformers")),
        *(("swarm", module) for module in ("argparse", "swarm_protocol.errors", "torch")),
        ("swarm_client", "argparse"),
    ],
)
def test_interrupted_while_it_is_imported(package, module, tmp_path):
    command = [] if package == "swarm_server" else ["status"]
    result = python(INTERRUPTED, module, package, *command, cache=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_server_gets_ready_without_what_it_does_not_use(tmp_path):
    model = tmp_path / "llama"
    save_checkpoint("llama", model)
    arguments = ["--model", str(model), "--quant", "int8", "--swarm", f"start-{os.getpid()}"]
    result = python(READY, json.dumps([*UNUSED, "torch", "transformers"]), *arguments, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == ["torch", "transformers"]
