"""Answers that are audited while some peers of a stage have not taken the step yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_protocol.errors import PeerMoved
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.routing.run_stages import Stages
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import MicroBatch, StageRequest
from swarm_training.stages.trainer.auditor import Auditor
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.peer_caller import StepOver
from tests.worlds.virtual_time import run_virtually

NOW = Moment(0, 3)
ASKED = StageRequest(MicroBatch(0, NOW, 0), torch.zeros(1, 2, dtype=torch.int64))
RIGHT, WRONG = StageAnswer(torch.ones(1, 2, 4)), StageAnswer(-torch.ones(1, 2, 4))
NEVER = 1e9


@dataclass
class FakeStage:
    """A stage whose peers take a step at different times, of whom one may answer wrongly.

    Attributes:
        steps_at: when each peer has taken the step, in seconds.
        upheld: the mates that have judged the liar.
        moment: the step that the peers take.
    """

    steps_at: dict[str, float]
    liar: str = ""
    asked: list[str] = field(default_factory=list)
    upheld: set[str] = field(default_factory=set)
    moment: Moment = NOW

    def look(self) -> Stages:
        now = asyncio.get_running_loop().time()
        before = Moment(0, self.moment.step - 1)
        return [
            [
                Progress("run/0", name, step=(self.moment if at_s <= now else before).step, address="127.0.0.1:1")
                for name, at_s in self.steps_at.items()
            ]
        ]

    def asker(self, look: Any) -> Any:
        """Asks the first peer that there is."""

        async def ask(asked: StageRequest, kept_by: str | None = None) -> tuple[StageAnswer, Progress]:
            there = [peer.peer_id for peer in look()[0] if peer.moment == self.moment]
            if not there:
                raise StepOver
            self.asked.append(there[0])
            return WRONG if there[0] == self.liar else RIGHT, Progress("run/0", there[0])

        return SimpleNamespace(ask=ask)

    async def attest(self, peer: Progress, *_: object, **__: object) -> Any:
        return SimpleNamespace(statement=SimpleNamespace(sketch=()))

    async def accuse(self, mate: Progress, *_: object) -> bool:
        if self.steps_at[mate.peer_id] > asyncio.get_running_loop().time():
            raise PeerMoved("it is at another step")
        self.upheld.add(mate.peer_id)
        return True


async def audited(stage: FakeStage) -> StageAnswer:
    auditor = Auditor(TrainerConfig(audit_share=1.0), stage.look, stage.asker, stage)
    answer, _ = await auditor.ask(ASKED)
    return answer


pytestmark = pytest.mark.run_by(function=run_virtually)


async def test_a_peer_that_is_ahead_of_its_mates_is_not_believed() -> None:
    stage = FakeStage({"a": 0.0, "b": 0.2, "c": 0.4}, liar="a")
    assert await audited(stage) is RIGHT
    assert stage.asked[:3] == ["a", "b", "c"]


async def test_mates_that_lag_behind_judge_a_liar_too() -> None:
    """Two of them are needed to exclude it."""
    stage = FakeStage({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.3}, liar="a")
    assert await audited(stage) is RIGHT
    assert stage.upheld == {"b", "c", "d"}


@pytest.mark.parametrize("others", [{}, {"b": NEVER}])
async def test_a_peer_without_mates_that_can_check_it_is_believed(others: dict[str, float]) -> None:
    stage = FakeStage({"a": 0.0, **others})
    assert await audited(stage) is RIGHT
    assert stage.asked == ["a"]


async def test_a_mate_that_stays_behind_holds_the_run_up_once() -> None:
    stage = FakeStage({"a": 0.0, "b": NEVER})
    auditor = Auditor(TrainerConfig(audit_share=1.0), stage.look, stage.asker, stage)
    await auditor.ask(ASKED)
    waited_s = asyncio.get_running_loop().time()
    for step in range(3, 13):
        stage.moment = Moment(0, step)
        await auditor.ask(replace(ASKED, which=replace(ASKED.which, moment=stage.moment)))
    assert asyncio.get_running_loop().time() == waited_s
