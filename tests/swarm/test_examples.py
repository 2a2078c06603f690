"""The examples run as their docstrings say, and show what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_cli.demo.local_cluster import LocalCluster
from tests.swarm.processes import run_commands

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str, cache: Path, stdin: str = "") -> str:
    """What the example prints."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def swarm(cluster: LocalCluster) -> Iterator[str]:
    """A swarm of the shipped model, for examples that need not show that they start servers of their own."""
    name = f"examples-{os.getpid()}"
    servers = [
        cluster.start("--blocks", blocks, "--swarm", name, "--throughput", "100") for blocks in ("0:10", "10:20")
    ]
    cluster.wait_ready(servers)
    yield name
    for server in servers:
        server.kill()


@pytest.fixture
def run_in_swarm(swarm: str, cache_home: Path) -> Callable[..., str]:
    """Runs an example with servers that are there, in a process that has imported everything."""

    def run_in_swarm(name: str, *arguments: str) -> str:
        script = str(ROOT / "examples" / name)
        (outcome,) = run_commands(script, [["--swarm", swarm, *arguments]], cache_home)
        assert outcome.code == 0 and "Traceback" not in outcome.stderr, outcome.stderr
        return outcome.stdout

    return run_in_swarm


def assert_learned(printed: str) -> None:
    found = re.search(r"begins (\d) of 6 descriptions before, (\d) of 6 after", printed)
    assert found[1] == "0" and int(found[2]) >= 5


def test_lora_teaches_a_habit(run_in_swarm):
    assert_learned(run_in_swarm("finetune_lora.py"))


def test_two_clients_teach_one_adapter(tmp_path):
    printed = run("lora_together.py", "--output", str(tmp_path / "adapter"), cache=tmp_path)
    assert_learned(printed)
    assert "the same adapter, bit for bit" in printed
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_prompts_teach_a_habit(run_in_swarm, tmp_path):
    printed = run_in_swarm("finetune_prompts.py", "--output", str(tmp_path / "prompts"))
    assert_learned(printed)
    assert (tmp_path / "prompts" / "prompts.safetensors").exists()


def test_classifier_learns(run_in_swarm):
    found = re.search(r"Right on held-out snippets: (\d+)% before, (\d+)% after", run_in_swarm("classifier.py"))
    assert int(found[1]) < 75 and int(found[2]) >= 90


def test_hidden_states_forgive_typos(run_in_swarm):
    found = re.search(r"(\d+) found their original before, (\d+) after", run_in_swarm("hidden_states.py"))
    assert int(found[2]) >= 2 * int(found[1])


def test_generate_starts_servers_of_its_own(tmp_path):
    printed = run("generate.py", "Return a list of", cache=tmp_path)
    assert printed.count("Return a list of") == 5


def test_chat_computes_every_token_once(swarm, cache_home):
    printed = run("chat.py", "--swarm", swarm, cache=cache_home, stdin="What is a list?\nAnd a tuple?\n")
    counts = re.findall(r"has (\d+) tokens; (\d+) were computed so far, (each once|with the draft)", printed)
    assert len(counts) == 2
    for length, computed, how in counts:  # a busy machine may be slow enough for a draft to be worth its while
        num_in_vain = int(computed) - (int(length) - 1)
        assert num_in_vain == 0 if how == "each once" else num_in_vain >= 0


def test_peers_of_different_speeds_train_a_language_model_as_one_process_does(tmp_path):
    printed = run("train_together/language_model.py", "--quick", cache=tmp_path)
    assert "peer 2 was killed" in printed and "peer 4 joined" in printed
    rows = re.findall(r"^ *\d+ +\d+ +\d+ +([\d.]+) +([\d.]+) +[+-][\d.]+%$", printed, re.MULTILINE)
    losses = [(float(together), float(alone)) for together, alone in rows]
    assert losses[-1][0] < losses[0][0] - 0.2
    assert all(abs(together / alone - 1) < 0.03 for together, alone in losses)
    equal = re.search(r"after (\d+) of (\d+) steps all parameters", printed)
    assert equal[1] == equal[2] and int(equal[1]) >= 10
    assert int(re.search(r"peer 4 contributed to (\d+)", printed)[1]) >= 2


def test_peers_train_a_model_that_draws(tmp_path):
    printed = run("train_together/text_to_image.py", "--quick", "--output", str(tmp_path), cache=tmp_path)
    assert re.search(r"named right of 10 drawings: \d+% before, \d+% after", printed)
    assert (tmp_path / "before.png").read_bytes() != (tmp_path / "after.png").read_bytes()


def test_a_caption_that_cannot_be_drawn_is_refused(tmp_path):
    script = str(ROOT / "examples/train_together/text_to_image.py")
    (outcome,) = run_commands(script, [["--caption", "a purple seven"]], tmp_path)
    assert outcome.code == 2
    assert "the model does not know purple" in outcome.stderr and "Traceback" not in outcome.stderr


def test_a_mixture_learns_more_than_one_expert_though_some_die(tmp_path):
    printed = run("experts.py", "--steps", "90", cache=tmp_path)
    assert "killed the server of" in printed and "2 of 2 new experts are in use" in printed
    found = re.search(r"after 90 steps: ([\d.]+) with one expert, ([\d.]+) with the mixture", printed)
    assert float(found[2]) < float(found[1]) - 0.03


def test_a_model_is_trained_in_stages_and_served_by_those_who_trained_it(tmp_path):
    printed = run("train_swarm.py", "--quick", "--output", str(tmp_path / "docs"), cache=tmp_path)
    assert "killed a process of stage 1" in printed and "the 3 processes serve the model" in printed
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+),", printed)]
    assert losses[-1] < losses[0] - 0.5
    assert "step 12:" in printed
    assert printed.count("\n---") == 3
    assert (tmp_path / "docs" / "model.safetensors.index.json").exists()
