"""The first commands of the README, typed by somebody who has Python, a clone of the repository, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pexpect
import pytest

from tests.swarm.terminal import CTRL_C

ROOT = Path(__file__).parents[2]
NOT_IN_A_CLONE = (".*", "build", "*.egg-info", "*.so", "__pycache__", "site", "bench-models")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # the kernels are compiled


def first_commands() -> list[str]:
    """The lines of the first block for a shell, without comments."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    return [line.partition("  #")[0].rstrip() for line in block.splitlines()]


def new_environment(directory: Path) -> dict[str, str]:
    """The variables of a shell in which a new virtual environment is active."""
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SWARM_"))}
    return kept | {
        "PATH": f"{directory / 'venv' / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),  # the newest torch would bring gigabytes of CUDA
        "HF_HUB_OFFLINE": "1",
    }


def run(command: str, clone: Path, environment: dict[str, str]) -> str:
    """What the command prints."""
    done = subprocess.run(["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def chat(url: str) -> str:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    with urllib.request.urlopen(f"{url}v1/models") as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_one_minute_to_a_running_swarm(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_IN_A_CLONE))
    environment = new_environment(tmp_path)
    install, install_model, demo, up = first_commands()
    assert install.startswith("pip install") and install_model.startswith("pip install")
    run(f"{install} && {install_model}", clone, environment)
    environment |= {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
    assert re.search(r"[1-9]\d*( of \d+)? tokens are the same", run(demo, clone, environment))
    with pexpect.spawn(
        "bash", ["-c", f"exec {up} --port 0 --no-browser"], env=environment, cwd=clone, encoding="utf-8", timeout=300
    ) as running:
        running.expect(r"Swarm is up at (\S+) with")
        url = running.match[1]
        assert chat(url)
        with urllib.request.urlopen(url) as page:
            assert b"<title>" in page.read()
        running.send(CTRL_C)
        running.expect(pexpect.EOF)
    assert running.exitstatus == 0
