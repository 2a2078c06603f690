"""``swarm doctor`` as a command, well and ill."""

from __future__ import annotations

import json

import pytest

from tests.swarm.processes import run_commands


def subjects(outcome) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(outcome)["checks"]}


@pytest.mark.promise("swarm doctor looks for what keeps a machine from using a swarm")
def test_with_a_server_of_this_machine(cluster, cache_home):
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
