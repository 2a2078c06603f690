"""The client's commands as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from swarm_cli.demo.demo import verdict
from swarm_cli.demo.local_cluster import LocalCluster
from swarm_models.checkpoints.default_model import ALIASES, DEFAULT_MODEL, SMALL_CHAT_MODEL
from tests.marks import SLOW
from tests.small_chat_model import ANSWER, NEEDS_IT, QUESTION
from tests.swarm.processes import Outcome, run_commands
from tests.swarm.waiting import wait_for

SHIPPED = ("--model", DEFAULT_MODEL)  # the demo's own choice is larger if it is installed


def run(*arguments: str, cache: str, **more: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "swarm_client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def processes_with(text: str) -> list[int]:
    """Processes of this machine whose command line contains the text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.promise("swarm demo writes text through servers on this machine, one of which is killed")
def test_demo_writes_text_through_a_death_compares_it_and_leaves_nothing_behind(tmp_path, tmp_path_factory):
    cache, temporary = tmp_path / "cache", tmp_path_factory.mktemp("t")
    result = run("demo", *SHIPPED, "--max-new-tokens", "24", cache=cache, TMPDIR=str(temporary))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr == ""
    assert re.search(r"replicas +1{10}2{10}", result.stdout)
    killed = re.search(r"\[server (…\w+) was killed here\]", result.stdout)[1]
    recovery = rf"server {killed} .*; blocks 10:20 move to …\w+; replayed \d+ tokens in [\d.]+ s"
    assert re.search(recovery, " ".join(result.stdout.split()))
    assert re.search(r"24 tokens, [\d.]+ tokens/s", result.stdout)
    assert re.search(r"(All 24 tokens are the same|The first \d+ of 24 tokens are the same)", result.stdout)
    swarm = re.search(r"swarm (demo-\d+)", result.stdout)[1]
    assert processes_with(swarm) == []
    assert not (cache / "swarm" / "swarms" / swarm).exists()
    assert list(temporary.iterdir()) == []


@NEEDS_IT
@pytest.mark.slow
def test_demo_answers_a_question_through_a_death(tmp_path):
    result = run("demo", cache=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    said, file = " ".join(result.stdout.split()), ALIASES[SMALL_CHAT_MODEL].file
    assert f"Starting three servers for blocks 0:15, 15:30, 15:30 of {file} …" in said
    assert re.search(rf"{re.escape(QUESTION)} The capital of \w* ?\[server …\w+ was killed here\] [\w ]*Paris\.", said)
    assert f"{QUESTION} {ANSWER} All 8 tokens are the same." in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_demo_that_is_ended_leaves_nothing_for_long(number, tmp_path, tmp_path_factory):
    cache, temporary = tmp_path / "cache", tmp_path_factory.mktemp("t")
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    demo = subprocess.Popen(
        [sys.executable, "-m", "swarm_client", "demo", *SHIPPED],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    swarms = cache / "swarm" / "swarms"
    wait_for(lambda: len(list(swarms.glob("demo-*/*.json"))) == 3, "the servers of the demo are there")
    demo.send_signal(number)
    _, errors = demo.communicate()
    assert demo.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert errors == b""
    swarm = f"demo-{demo.pid}"
    wait_for(lambda: not processes_with(swarm), "the servers have ended")
    if number == signal.SIGKILL:
        assert (swarms / swarm).exists() and list(temporary.iterdir())
        with LocalCluster({"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}) as cluster:
            cluster.wait_ready([cluster.start("--blocks", "0:2")])
        run("status", cache=cache, TMPDIR=str(temporary))
    assert not (swarms / swarm).exists()
    wait_for(lambda: not list(temporary.iterdir()), "temporary files are gone")


@pytest.mark.promise("the demo says how far the text is that of the local model")
@pytest.mark.parametrize(
    ("remote", "local", "sentence"),
    [
        ([1, 2, 3], [1, 2, 3], "All 3 tokens are the same."),
        ([1, 2, 4], [1, 2, 3], "The first 2 of 3 tokens are the same; then int8 rounding chose another."),
        ([1], [1, 2, 3], "The first 1 of 3 tokens are the same; then int8 rounding chose another."),
    ],
)
def test_verdict_counts_the_common_beginning(remote, local, sentence):
    assert verdict(remote, local) == sentence


WRONG, FAILED = 2, 1  # exit codes: the command line is wrong; what it asks for cannot be had
MISTAKES = {
    "status-of-no-swarm": (["status"], "no swarm named .* start a server with `python -m swarm_server`", FAILED),
    "generate-without-swarm": (["generate", "x"], "no swarm named 'default' runs on this machine", FAILED),
    "chat-without-swarm": (["chat"], "no swarm named 'default' runs on this machine", FAILED),
    "no-prompt": (["generate", ""], "the prompt is empty", WRONG),
    "temperature": (["generate", "x", "--temperature", "-1"], "temperature is -1.0: expected 0 or more", WRONG),
    "adapter": (["generate", "x", "--adapter", "./nowhere"], "adapter ./nowhere is no directory", WRONG),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    commands = [arguments for arguments, *_ in MISTAKES.values()]
    return dict(zip(MISTAKES, run_commands("swarm_client", commands, tmp_path_factory.mktemp("user")), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_one_sentence(outcomes, name):
    _, sentence, code = MISTAKES[name]
    outcomes[name].assert_one_sentence(sentence, code)


def subjects(outcome) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(outcome)["checks"]}


@pytest.mark.promise("swarm doctor looks for what keeps a machine from using a swarm")
def test_doctor_with_a_server_of_this_machine(cluster, cache_home):
    server = cluster.start("--blocks", "0:20", "--quant", "none", "--throughput", "10", "--swarm", "mine")
    try:
        cluster.wait_ready([server])
        (result,) = run_commands("swarm_client", [["doctor", "--swarm", "mine", "--json"]], cache_home)
    finally:
        server.kill()
    assert (result.code, result.stderr, result.left_behind) == (0, "", []), result.stdout
    found = subjects(result.stdout)
    assert json.loads(result.stdout)["ok"] is True
    assert found["servers here"]["found"] == "1 of swarm mine on this machine"
    assert "1 of 1 servers answer" in found["swarm"]["found"]
    assert any(subject.startswith("server …") for subject in found)


@SLOW
def test_a_swarm_without_a_home(tmp_path):
    place = tmp_path / "file"
    place.touch()
    environment = {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache"), "HF_HOME": str(place / "hf")}
    with LocalCluster(environment) as cluster:
        server = cluster.start("--blocks", "0:20", "--throughput", "100")
        cluster.wait_ready([server])
        peer = server.ready["peer"]
        given = run("generate", "Return a", "--max-new-tokens", "4", "--initial-peers", peer, cache="", **environment)
        words = server.stderr.read_text()
        alone = run("status", cache="", **environment)
    assert (given.returncode, given.stderr) == (0, "blocks 0:20 cannot be checked: no second server has them\n")
    assert alone.returncode == 1
    assert alone.stderr.startswith("error: no swarm named 'default' runs on this machine")
    assert "Traceback" not in words
    assert words.count("servers of this machine will not share its cores") == 1
    assert words.count("others of this machine will not find this server") == 1
