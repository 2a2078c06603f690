"""Reports: what TensorBoard itself reads back, what reaches Weights & Biases, and mistakes that end in a sentence."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swarm_training.contract.views import BanView, HeldOutView, PeerView, RunView
from swarm_training.reports.reporter import parse_report
from swarm_training.reports.scalars import scalars_of
from swarm_training.reports.stepping import SETTLED_S, StepReports, open_reports
from tests.marks import SLOW

VIEW = RunView(
    run="my-run",
    step=41,
    loss=2.5,
    samples=512,
    target_batch_size=2048,
    next_step_s=75.0,
    bytes_sent=1000,
    bytes_received=999,
    peers=(PeerView("QmSlow12345678", "ada", 100, 2.5), PeerView("QmFast87654321", "", 412, 10.0)),
    bans=(BanView("QmEvil00000000", 8200.0, "sends noise"),),
    rollbacks=2,
    learning_rate=0.125,
    checkpoint=40,
    computing=0.75,
    held_out=HeldOutView(40, 2.75),
)
SCALARS = {
    "loss/training": 2.5,
    "loss/held_out": 2.75,
    "learning_rate": 0.125,
    "computing_share": 0.75,
    "samples_per_s/total": 12.5,
    "samples_per_s/12345678": 2.5,
    "samples_per_s/87654321": 10.0,
    "bytes/sent": 1000,
    "bytes/received": 999,
    "run/peers": 2,
    "run/bans": 1,
    "run/rollbacks": 2,
    "run/checkpoint": 40,
}


class Kept:
    """A place that keeps what is added; ``fails`` is raised instead if there is one."""

    def __init__(self, fails: OSError | None = None) -> None:
        self.added: list[tuple[int, dict[str, float]]] = []
        self.fails = fails
        self.is_closed = False

    def add(self, step: int, scalars: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.added.append((step, dict(scalars)))

    def close(self) -> None:
        self.is_closed = True


def test_every_number_of_a_view_has_a_name() -> None:
    assert scalars_of(VIEW) == SCALARS
    unknown = replace(VIEW, loss=inf, learning_rate=None, computing=None, checkpoint=None, held_out=None)
    gone = {"loss/training", "loss/held_out", "learning_rate", "computing_share", "run/checkpoint"}
    assert scalars_of(unknown) == {name: value for name, value in SCALARS.items() if name not in gone}


def test_a_step_is_reported_once_when_the_run_has_gone_on_or_has_settled() -> None:
    place = Kept()
    reports = StepReports([place])
    for now_s, view in (
        (0.0, replace(VIEW, step=1, loss=9.0)),
        (2.0, replace(VIEW, step=1, loss=1.0)),  # the record of a slower peer has come
        (4.0, replace(VIEW, step=2, loss=9.0)),
        (4.0 + SETTLED_S, replace(VIEW, step=2, loss=2.0)),
        (6.0 + SETTLED_S, replace(VIEW, step=2, loss=9.0)),
        (8.0 + SETTLED_S, replace(VIEW, step=1, rollbacks=3, loss=3.0)),
    ):
        reports.see(view, now_s)
    assert [(step, scalars["loss/training"]) for step, scalars in place.added] == [(1, 1.0), (2, 2.0)]
    reports.close()
    assert place.is_closed and place.added[-1] == (1, {**SCALARS, "loss/training": 3.0, "run/rollbacks": 3})


def test_a_place_that_fails_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    full, place = Kept(OSError("no space left")), Kept()
    reports = StepReports([full, place])
    for _ in range(2):
        reports.report(VIEW)
    assert place.added == [(41, SCALARS)] * 2
    (warning,) = caplog.messages
    assert warning == "reports end at step 41, because they cannot be written: no space left"


def test_a_place_that_cannot_be_opened_closes_those_that_were_opened_before() -> None:
    def refused(run: str) -> Kept:
        raise ValueError(f"the reports of {run} cannot begin")

    first, second = Kept(), Kept()
    with pytest.raises(ValueError, match="the reports of my-run cannot begin"):
        open_reports([lambda _: first, refused, lambda _: second], "my-run")
    assert first.is_closed and not second.is_closed
    open_reports([lambda _: second], "my-run").report(VIEW)
    assert second.added and not second.is_closed


@SLOW
def test_tensorboard_reads_what_was_written_without_the_steps_that_were_undone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = parse_report(f"tensorboard:{tmp_path / 'logs'}")("my-run")
    for step, loss in ((1, 4.0), (2, 3.0), (3, 99.0), (2, 2.5), (3, 2.0)):
        reporter.add(step, {"loss/training": loss, "run/peers": 2.0})
    reporter.close()
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert events.Tags()["scalars"] == ["loss/training", "run/peers"]
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [(1, 4.0), (2, 2.5), (3, 2.0)]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the reports of run my-run cannot be in .*file/logs: Not a directory"):
        parse_report(f"tensorboard:{tmp_path / 'file' / 'logs'}")("my-run")


def test_weights_and_biases_gets_each_step_on_an_axis_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, with the functions that its documentation names."""
    calls: list[tuple[Any, ...]] = []

    class Refused(Exception):
        pass

    def init(project: str, name: str) -> Any:
        if project == "forbidden":
            raise Refused("no key")
        calls.append(("init", project, name))

        def log(numbers: dict[str, float]) -> None:
            if numbers["step"] > 3:
                raise Refused("the service is gone")
            calls.append(("log", numbers))

        return SimpleNamespace(
            define_metric=lambda name, step_metric: calls.append(("metric", name, step_metric)),
            log=log,
            finish=lambda: calls.append(("finish",)),
        )

    fake = ModuleType("wandb")
    fake.__dict__.update(init=init, Error=Refused)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "swarm_training.reports.wandb_reporter", raising=False)
    reporter = parse_report("wandb:our-project")("my-run")
    reporter.add(3, {"loss/training": 2.0})
    with pytest.raises(OSError, match="the service is gone"):
        reporter.add(4, {"loss/training": 2.0})
    reporter.close()
    assert calls == [
        ("init", "our-project", "my-run"),
        ("metric", "*", "step"),
        ("log", {"loss/training": 2.0, "step": 3}),
        ("finish",),
    ]
    with pytest.raises(ValueError, match="--report wandb:forbidden cannot begin: no key"):
        parse_report("wandb:forbidden")("my-run")


@pytest.mark.parametrize("text", ["", "tensorboard", "tensorboard:", "csv:logs", ":logs"])
def test_a_place_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--report is '.*': expected tensorboard:DIR or wandb:PROJECT"):
        parse_report(text)


@pytest.mark.parametrize(
    ("text", "module", "command"),
    [
        ("tensorboard:logs", "torch.utils.tensorboard", 'pip install "swarm-lm[report]"'),
        ("wandb:us", "wandb", "pip install wandb"),
    ],
)
def test_a_missing_package_is_named(text: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"--report {text} needs .* cannot be imported") as raised:
        parse_report(text)
    assert command in str(raised.value)
