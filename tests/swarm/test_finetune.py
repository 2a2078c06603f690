"""``python -m swarm_client finetune`` as a user runs it, on a tiny model."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swarm_client.generation.generation import load_tokenizer
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_server.training.stateless import StatelessPasses
from tests.marks import always
from tests.swarm.harness import InProcessServers
from tests.swarm.processes import ForkedProcess, Outcome, run_commands
from tests.swarm.waiting import DEADLINE_S, without_waits
from tests.zoo import save_checkpoint

TEXTS = [
    f"Return the {thing} of the {place}." for thing in ("name", "size", "list") for place in ("file", "line", "end")
]
LORA = ["--max-steps", "12", "--learning-rate", "0.01", "--lora-dropout", "0.1", "--target-modules", "q_proj", "v_proj"]
RUNS = {
    "lora": [*LORA, "--gradient-accumulation", "2", "--save-every", "5", "--eval-every", "4"],
    "prompt": ["--method", "prompt", "--num-prompt-tokens", "4", "--epochs", "6", "--learning-rate", "0.1"],
    "deep-prompt": [
        *("--method", "deep-prompt", "--max-steps", "30", "--learning-rate", "0.3", "--optimizer", "adamw-8bit"),
        *("--schedule", "constant", "--num-prompt-tokens", "4", "--early-stopping", "1", "--eval-every", "3"),
    ],
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[InProcessServers]:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory, vocab_size=4096, attention_dropout=0.1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(locate(DEFAULT_MODEL)) / name, directory)
    with InProcessServers(directory) as servers:
        servers.start("0:2", "2:6")
        yield servers


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with data: ``good.jsonl`` and ``broken.jsonl``."""
    place = tmp_path_factory.mktemp("finetune")
    lines = [json.dumps({"text": text}) for text in TEXTS * 3]
    (place / "good.jsonl").write_text("\n".join(lines))
    (place / "broken.jsonl").write_text("\n".join([*lines[:4], lines[4][:-2]]))
    return place


def command(servers: InProcessServers, place: Path, name: str, *more: str) -> list[str]:
    where = ["--model", str(servers.model), "--swarm", servers.swarm]
    data = ["--data", str(place / "good.jsonl"), "--validation-share", "0.2", "--batch-size", "3"]
    return ["finetune", *where, *data, "--output", str(place / name), *more]


@pytest.fixture(scope="module")
def run(servers, place, cache_home) -> Callable[[str], Outcome]:
    """Run the command of ``RUNS`` that has this name, when it is first asked for."""

    @functools.cache
    def run(name: str) -> Outcome:
        return run_commands("swarm_client", [command(servers, place, name, *RUNS[name])], cache_home)[0]

    return run


@pytest.fixture(scope="module")
def outcomes(run) -> dict[str, Outcome]:
    return {name: run(name) for name in RUNS}


def history(directory: Path, key: str) -> list[tuple[int, float]]:
    entries = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry[key]) for entry in entries if key in entry]


@pytest.mark.promise("swarm finetune trains an adapter from a file of texts")
@pytest.mark.parametrize("name", always("lora", among=RUNS))
def test_a_run_lowers_the_loss_and_says_how_to_use_what_it_wrote(run, place, name):
    outcome, directory = run(name), place / name
    assert outcome.code == 0, outcome.stderr
    assert without_waits(outcome.stderr) == [] and outcome.left_behind == []
    losses = history(directory, "eval_loss")
    assert losses[0][0] == 0 and min(losses[1:], key=lambda pair: pair[1])[1] < losses[0][1] - 0.1
    assert "step 0/" in outcome.stdout and f"adapter: {directory}" in outcome.stdout
    assert f"--adapter {directory}" in outcome.stdout
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (directory / "tokens").exists()
    (note,) = re.findall("^note: .*$", outcome.stdout, re.M)
    assert "without the dropout in the model's own blocks (attention_dropout=0.1" in note


def test_only_the_adapter_is_saved_and_plain_peft_loads_it(outcomes, servers, place):
    directory = place / "lora"
    for saved in (directory, *directory.glob("checkpoint-*")):
        files = {"adapter_model.safetensors", *(["model.safetensors"] if saved != directory else [])}  # for Trainer
        assert {path.name for path in saved.glob("*.safetensors")} == files
        assert all(len(load_file(saved / name)) == 24 for name in files)
    assert sorted(path.name for path in directory.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-12"]
    assert [step for step, _ in history(directory, "eval_loss")] == [0, 4, 8, 12]
    model = AutoModelForCausalLM.from_pretrained(servers.model, dtype=torch.float32)
    ids = load_tokenizer(servers.model)(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        after = PeftModel.from_pretrained(model, directory)(ids, labels=ids).loss
    assert after < before - 0.1


@pytest.fixture(scope="module")
def generated(outcomes, servers, place, cache_home) -> dict[str, str]:
    where = ["--model", str(servers.model), "--swarm", servers.swarm, "--max-new-tokens", "8", "--temperature", "0"]
    adapters = {"": [], **{name: ["--adapter", str(place / name)] for name in RUNS}}
    commands = [["generate", "Return", *where, *options] for options in adapters.values()]
    found = run_commands("swarm_client", commands, cache_home)
    assert all(outcome.code == 0 for outcome in found), found
    return {name: outcome.stdout for name, outcome in zip(adapters, found, strict=True)}


@pytest.mark.parametrize("name", RUNS)
def test_generate_with_what_was_trained(generated, name):
    assert generated[name].startswith("Return")
    assert generated[name] != generated[""]


def test_generate_with_what_servers_have_loaded(generated, servers, place, cache_home):
    with InProcessServers(servers.model) as adapted:
        adapted.start("0:3", "3:6", adapters=(place / "lora",))
        where = ["--model", str(servers.model), "--swarm", adapted.swarm]
        options = ["--max-new-tokens", "8", "--temperature", "0"]
        commands = [["generate", "Return", *where, *options, "--adapter", name] for name in ("lora", "cook")]
        found, unknown = run_commands("swarm_client", commands, cache_home)
    assert (found.code, found.stdout) == (0, generated["lora"])
    assert unknown.code == 1
    assert "error: no server has adapter 'cook': they have lora" in unknown.stderr


@contextmanager
def begun(arguments: list[str], cache: Path, log: Path, line_begins: str) -> Iterator[ForkedProcess]:
    """Runs the command until it prints such a line."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    process = ForkedProcess("swarm_client", arguments, log, environment)
    try:
        line = "not empty"
        while line and not re.match(line_begins, line):
            line = process.stdout.readline()
        yield process
    finally:
        process.kill()


def assert_as_if_nothing_had_happened(directory: Path, expected: Path) -> None:
    found, uninterrupted = (load_file(path / "adapter_model.safetensors") for path in (directory, expected))
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in uninterrupted.items())
    for key in ("loss", "eval_loss"):
        assert dict(history(directory, key)) == pytest.approx(dict(history(expected, key)), rel=1e-4)


def test_ctrl_c_saves_and_the_resumed_run_ends_as_if_nothing_had_happened(outcomes, servers, place, cache_home):
    arguments = command(servers, place, "interrupted", *RUNS["lora"])
    with begun(arguments, cache_home, log := place / "interrupted.log", "step [1-9]") as process:
        os.killpg(process.pid, signal.SIGINT)
        stdout = process.stdout.read()
        assert process.wait(DEADLINE_S) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert "which is saved; go on with" in stdout and "--resume" in stdout
    (checkpoint,) = (place / "interrupted").glob("checkpoint-*")
    assert int(checkpoint.name.removeprefix("checkpoint-")) < 12
    (resumed,) = run_commands("swarm_client", [[*arguments, "--resume"]], cache_home)
    assert resumed.code == 0, resumed.stderr
    assert f"going on from {checkpoint}" in resumed.stdout
    assert_as_if_nothing_had_happened(place / "interrupted", place / "lora")


def test_when_all_servers_go_the_last_step_is_saved_and_the_run_goes_on_with_others(
    outcomes, servers, place, cache_home
):
    with InProcessServers(servers.model) as leaving:
        running = leaving.start("0:6")
        arguments = command(leaving, place, "left", *RUNS["lora"], "--recovery-timeout", "1", "--wait", "1")
        with begun(arguments, cache_home, place / "left.log", "step 4/12: validation") as process:
            leaving.stop(*running)
            assert process.wait(DEADLINE_S) == 1
    stderr = (place / "left.log").read_text()
    assert "Traceback" not in stderr and "error: " in stderr.splitlines()[-1]
    step = int(re.search(r"step (\d+) was the last, and is saved; go on with", stderr)[1])
    assert 0 < step < 12 and (place / "left" / f"checkpoint-{step}").is_dir()
    others = command(servers, place, "left", *RUNS["lora"], "--resume")
    (resumed,) = run_commands("swarm_client", [others], cache_home)
    assert resumed.code == 0, resumed.stderr
    assert_as_if_nothing_had_happened(place / "left", place / "lora")


def test_training_that_diverges_is_no_fault_of_servers(servers, place, cache_home, monkeypatch):
    """It ends at once, in one sentence; the last step, whose weights are finite, is saved."""
    runs, computing = 0, StatelessPasses._run_plain

    def overflows_in_the_end(*arguments) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return computing(*arguments) * (torch.inf if runs > 10 else 1)

    monkeypatch.setattr(StatelessPasses, "_run_plain", overflows_in_the_end)
    options = [*LORA, "--learning-rate", "1000", "--validation-share", "0"]
    (outcome,) = run_commands("swarm_client", [command(servers, place, "diverged", *options)], cache_home)
    assert outcome.code == 1, outcome
    *others, line = [line for line in outcome.stderr.splitlines() if not line.startswith("loading blocks:")]
    assert not any(re.search("not finite|Traceback|error: ", other) for other in others), outcome.stderr
    found = re.match(
        r"error: after (\d+) steps, .* not finite .*: training has diverged; lower the learning rate", line
    )
    assert found, outcome.stderr
    assert f"(--learning-rate is 1000); step {found[1]} is saved in {place / 'diverged'}" in line
    (checkpoint,) = (place / "diverged").glob(f"checkpoint-{found[1]}")
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "adapter_model.safetensors").values())


MISTAKES = {
    "no-data": (["--data", "/nowhere/data.txt"], "/nowhere/data.txt does not exist"),
    "broken-line": (["--data", "broken.jsonl"], r"line 5 of .*broken\.jsonl is not JSON"),
    "another-run": (["--output", "lora"], "has a run already: go on with it by --resume, or choose another --output"),
    "no-run": (["--resume"], "has no run to resume: leave --resume out to begin one"),
    "other-settings": (["--output", "lora", "--resume", *LORA, "--rank", "4"], "has --"),
    "other-data": (
        ["--output", "lora", "--resume", *RUNS["lora"], "--data", "broken.jsonl"],
        r"--data is not what the run in .*lora has begun with",
    ),
    "targets": (["--target-modules", "no_proj"], "no_proj"),
    "prompts": (["--method", "prompt", "--num-prompt-tokens", "300"], "has 256 positions, 300 of them for the prompt"),
    "swarm": (["--swarm", "a-swarm-of-nobody"], "no swarm named 'a-swarm-of-nobody'"),
}


@pytest.fixture(scope="module")
def refusals(outcomes, servers, place, cache_home) -> dict[str, Outcome]:
    def absolute(argument: str) -> str:
        return str(place / argument) if argument in ("broken.jsonl", "lora") else argument

    commands = [
        command(servers, place, f"mistake-{name}", *map(absolute, options)) for name, (options, _) in MISTAKES.items()
    ]
    return dict(zip(MISTAKES, run_commands("swarm_client", commands, cache_home), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_one_sentence(refusals, name):
    refusals[name].assert_one_sentence(MISTAKES[name][1], code=2 if name == "no-data" else 1)
