"""The live page: what it shows, as text and as JSON, of names that strangers chose too."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf

import pytest
from rich.console import Console, Group

from swarm_training.commands import watching
from swarm_training.commands.watching import as_json, picture, watch
from swarm_training.contract.views import BanView, HeldOutView, PeerView, RunView, StageView, UserView

VIEW = RunView(
    run="my-run",
    step=41,
    loss=2.34567,
    samples=512,
    target_batch_size=2048,
    next_step_s=75.0,
    bytes_sent=12_345_678,
    bytes_received=999,
    peers=(PeerView("QmSlow12345678", "ada", 100, 2.5), PeerView("QmFast87654321", "[red]\x1b[31mbob", 412, 10.0)),
    bans=(BanView("QmEvil00000000", 1000.0 + 7200.0, "sends noise"),),
    users=(UserView("ada", 900, 0.9), UserView("[red]\x1b[31mbob", 100, 0.1)),
)


def shown(view: RunView) -> str:
    console = Console(width=100, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(Group(*picture(view, now=1000.0)))
    return capture.get()


def test_everything_that_matters_is_on_the_page() -> None:
    text = shown(VIEW)
    for part in ("run my-run", "step 41", "loss 2.3457", "512 of 2048 samples (25%)", "12.5 samples/s", "in 1 min"):
        assert part in text
    assert re.search(r"ada .* 900 .* 90.0%", text)
    for part in ("12.3 MB sent, 999 B received", "…12345678", "ada", "2.5", "…00000000", "2 h", "sends noise"):
        assert part in text
    assert text.index("…87654321") < text.index("…12345678")  # the fastest first
    assert "\x1b" not in text and "[red]" in text


def test_a_loss_that_is_not_finite_and_the_rollback_after_it() -> None:
    broken = replace(VIEW, loss=inf)
    assert "loss not finite" in shown(broken) and "rollbacks" not in shown(broken)
    assert json.loads(json.dumps(as_json(broken), allow_nan=False))["loss"] is None
    after = replace(VIEW, step=30, rollbacks=2)
    assert "step 30   rollbacks 2   loss 2.3457" in shown(after) and as_json(after)["rollbacks"] == 2


def test_json_has_no_infinity_whatever_speeds_peers_claim() -> None:
    fast, slow = (replace(VIEW.peers[0], samples_per_s=speed) for speed in (1.7e308, 5e-324))
    found = as_json(replace(VIEW, peers=(fast, fast), next_step_s=1 / slow.samples_per_s))
    assert json.loads(json.dumps(found, allow_nan=False))["samples_per_s"] is None is found["next_step_s"]
    found = as_json(replace(VIEW, stages=(StageView(0, 41, 0, 3, False, inf),)))
    assert json.loads(json.dumps(found, allow_nan=False))["stages"][0]["micro_batches_per_s"] is None


def test_the_newest_loss_on_held_out_data_and_the_lowest_one() -> None:
    assert "held-out" not in shown(VIEW)
    evaluated = replace(VIEW, held_out=HeldOutView(40, 2.5), best_held_out=HeldOutView(30, 2.25))
    assert "loss on held-out data 2.5000 at step 40, lowest 2.2500 at step 30\n" in re.sub(
        " +\n", "\n", shown(evaluated)
    )
    assert as_json(evaluated)["best_held_out"] == {"step": 30, "loss": 2.25}
    broken = replace(evaluated, held_out=HeldOutView(40, None), best_held_out=None, has_ended=True)
    assert "held-out data not finite at step 40: the run has ended, as it falls no more" in shown(broken)


def test_a_run_that_nobody_computes_for() -> None:
    text = shown(RunView("run", 0, None, 0, 10, None, 0, 0))
    assert "nobody computes" in text and "loss" not in text and "banned" not in text and "share" not in text


def test_json_has_it_all_a_line_each_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching.time, "sleep", lambda _seconds: None)
    views = iter([VIEW, VIEW])

    def look() -> RunView:
        try:
            return next(views)
        except StopIteration:
            raise KeyboardInterrupt from None

    watch(look, 1.0, json_lines=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == json.loads(json.dumps(as_json(VIEW)))
    assert json.loads(lines[0])["peers"][0] == {
        "peer_id": "QmSlow12345678",
        "name": "ada",
        "samples": 100,
        "samples_per_s": 2.5,
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h"), (86400 * 3, "3 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert watching._duration(seconds) == text
