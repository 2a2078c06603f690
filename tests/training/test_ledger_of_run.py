"""The ledger of a private run of real processes, one of which is killed and comes back, as anybody may sum it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_training.ledger.archive import restored
from swarm_training.ledger.ledger import LedgerLimits
from swarm_training.runfile.example import example
from tests.marks import SLOW
from tests.quick_keys import new_identity
from tests.training.processes import ROOT, TIMEOUT_S, Volunteer, volunteers

SAMPLES, TARGET, STEPS = 4, 32, 6


def membership(directory: Path, organiser: OrganiserKey, user: str, file: str, role: Role = Role.TRAINER) -> str:
    identity, now = new_identity(), time.time()
    grant = Grant.new(organiser.public, role, user, identity.peer_id, now - 10, now + 10_000)
    MemberCredentials(grant, grant.signed(organiser), identity).write(directory / file)
    return str(directory / file)


def given(peer: Volunteer) -> dict[int, int]:
    """Samples by step, as the process itself counts its calls."""
    calls, samples = 0, {}
    for step, said in sorted(peer.steps().items()):
        samples[step] = SAMPLES * (said["calls"] - calls)
        calls = said["calls"]
    return samples


def totals(*argv: str) -> dict[str, list[int]]:
    """What ``swarm train ledger --json`` says: samples and rounds by user."""
    command = [sys.executable, "-c", "from swarm_cli.entry import main; main()", "train", "ledger", *argv, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=TIMEOUT_S, check=True)
    return {user["user"]: [user["samples"], user["rounds"]] for user in json.loads(done.stdout)["users"]}


@SLOW
def test_users_are_credited_across_the_death_of_a_process_and_anybody_can_sum_it(tmp_path: Path) -> None:
    organiser = OrganiserKey.generate()
    names = ("ada", "bob", "ada")
    tasks: list[dict[str, Any]] = [
        {
            "membership": membership(tmp_path, organiser, name, f"{number}.membership"),
            "config": {"ledger": str(tmp_path / f"{number}.ledger")},
        }
        for number, name in enumerate(names)
    ]
    run_file = tmp_path / "RUN.toml"
    text = example("RUN.toml").replace('"my-run"', '"toy"').replace("= 1024", f"= {TARGET}")
    run_file.write_text(text.replace('# organiser = ""', f'organiser = "{organiser.public}"'))
    common = {"steps": STEPS, "target": TARGET, "samples": SAMPLES, "call_s": 0.2}
    with volunteers(tasks, **common) as peers:
        for peer in peers:
            peer.go()
        bob = peers[1]
        bob.wait_for("step", step=2)
        bob.kill()
        limits = LedgerLimits.of(TARGET)
        before = restored(tmp_path / "1.ledger", "toy", limits, organiser.public).totals()["bob"]
        assert before.samples >= given(bob)[1]
        again = Volunteer(number=1, peers=peers[0].wait_for("joined")["peers"], **{**common, **tasks[1]})
        try:
            again.wait_for("joined")
            again.go()
            for peer in (peers[0], peers[2], again):
                peer.wait_for("done")
            ada = [*given(peers[0]).values(), *given(peers[2]).values()]
            addresses = peers[0].wait_for("joined")["peers"]
            looker = membership(tmp_path, organiser, "eve", "eve.membership", Role.CLIENT)
            found = totals(str(run_file), "--initial-peers", *addresses, "--membership", looker)
            struck = given(peers[0])[3] + given(peers[2])[3]  # bob may have led that step, and have died deciding
            assert set(found) == {"ada", "bob"} and sum(ada) - struck <= found["ada"][0] <= sum(ada)
            own, last = {**given(bob), **given(again)}, 2 * TARGET  # of a step that it had no time to tell of
            assert sum(own.values()) <= found["bob"][0] <= sum(own.values()) + last
            again.tell("ledger")
            own_totals = again.wait_for("ledger")["totals"]
            assert own_totals["bob"][0] >= before.samples + sum(given(again).values())
        finally:
            again.kill()
