"""The first second of a command: mistakes are found before anything heavy is imported, and Ctrl-C ends it quietly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "hivemind", "huggingface_hub", "datasets"]

# Runs command lines one after the other in one process; says how each ended and what is imported in the end.
RUN = """
import json, runpy, sys
package, commands, heavy = json.loads(sys.argv[1])
codes = []
for arguments in commands:
    sys.argv = [package, *arguments]
    try:
        runpy.run_module(package, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        codes.append(end.code)
sys.stdout.write("\\n" + json.dumps([codes, [name for name in heavy if name in sys.modules]]))
"""

# Runs a command line that gets SIGINT when a module begins to be imported.
INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module, package, *arguments = sys.argv[1:]
assert module not in sys.modules
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv = [package, *arguments]
runpy.run_module(package, run_name="__main__", alter_sys=True)
"""


def python(script: str, *arguments: str, cache: os.PathLike[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


WRONG = {
    "swarm_server": [
        ["--help"],
        ["--blocks", "10:5"],
        ["--quant", "int3"],
        ["--device", "toaster"],
        ["--dtype", "float8"],
        ["--port", "70000"],
        ["--announce-address", "host:port"],
        ["--swarm", "a/b"],
        ["--memory", "much"],
        ["--adapters", "/nowhere/adapter"],
        ["--model", "/nowhere/model"],
        ["--identity", "/nowhere/key"],
        ["--initial-peers", "localhost:31337"],
        ["--no-such-flag"],
    ],
    "swarm_client": [
        ["--help"],
        ["generate", "x", "--top-k", "0"],
        ["generate", "x", "--head-quant", "int3"],
        ["generate", "x", "--allow", "?"],
        ["generate", "x", "--adapter", "./nowhere"],
        ["generate", "x", "--model", "/nowhere/model"],
        ["generate", ""],
        ["finetune", "--data", "/nowhere/data.txt", "--output", "x"],
        ["finetune", "--data", "x", "--output", "x", "--method", "magic"],
        ["status", "--swarm", "a/b"],
        ["status", "--watch", "0"],
        ["status", "--initial-peers", "/ip4/1.2.3/tcp/1/p2p/Qm"],
        ["demo", "--max-new-tokens", "0"],
    ],
}


@pytest.mark.parametrize("package", WRONG)
def test_what_is_wrong_is_said_before_anything_heavy_is_imported(package, tmp_path):
    result = python(RUN, json.dumps([package, WRONG[package], HEAVY]), cache=tmp_path)
    assert result.returncode == 0, result.stderr
    codes, imported = json.loads(result.stdout.splitlines()[-1])
    assert codes == [0] + [2] * (len(WRONG[package]) - 1)
    assert imported == []
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == len(codes) - 1


@pytest.mark.parametrize("module", ["argparse", "swarm_protocol.errors", "torch", "transformers"])
def test_interrupted_while_a_server_is_imported(module, tmp_path):
    result = python(INTERRUPTED, module, "swarm_server", cache=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["argparse", "swarm_protocol.errors", "torch"])
def test_interrupted_while_a_client_is_imported(module, tmp_path):
    result = python(INTERRUPTED, module, "swarm_client", "status", cache=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
