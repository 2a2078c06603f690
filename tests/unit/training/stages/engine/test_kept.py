"""What forward keeps for backward: the same gradients bit for bit, of the present weights, within its room."""

from __future__ import annotations

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_training.stages.engine.kept import GraphMemoryMeter, KeptPass, KeptPasses
from swarm_training.stages.engine.settings import StageOptions
from swarm_training.stages.engine.stage import Stage
from tests import zoo
from tests.unit.training.stages.engine import passes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelCheckpoint:
    return passes.open_zoo("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


class Counted:
    """How often blocks of a stage are computed forward."""

    def __init__(self, stage: Stage) -> None:
        self.forwards = 0
        stage._base.register_forward_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        self.forwards += 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_those_of_a_stage_that_keeps_nothing(llama: ModelCheckpoint, precision: str) -> None:
    keeping, forgetful = (
        passes.stages_of(llama, 2, StageOptions(precision, kept_bytes=kept_bytes)) for kept_bytes in (1 << 30, 0)
    )
    counted = [Counted(stages[0]) for stages in (keeping, forgetful)]
    for seed in range(2):
        found, expected = (passes.through(stages, *passes.tokens(seed)) for stages in (keeping, forgetful))
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
        for stages in (keeping, forgetful):
            with torch.no_grad():
                for parameter in stages[0].parameters:
                    parameter.add_(0.01)
    assert [each.forwards for each in counted] == [2, 4]


def test_a_pass_that_no_backward_follows_is_not_kept(llama: ModelCheckpoint) -> None:
    (ids, _), stage = passes.tokens(), passes.stages_of(llama, 2)[0]
    expected, found = stage.forward(ids).hidden, stage.forward(ids, keeps=False).hidden
    assert found is not None and expected is not None and torch.equal(found, expected)
    assert len(stage._kept._passes) == 1


def test_what_was_computed_with_other_weights_is_dropped(llama: ModelCheckpoint) -> None:
    (ids, _), grad = passes.tokens(), torch.ones(2, 12, zoo.HIDDEN)
    stage, other = (passes.stages_of(llama, 2)[0] for _ in range(2))
    stage.forward(ids)
    for each in (stage, other):
        with torch.no_grad():
            for parameter in each.parameters:
                parameter.mul_(1.5)
    found, expected = (each.backward(ids, grad=grad).parameters for each in (stage, other))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_pass_is_used_once_and_found_by_its_inputs_alone(llama: ModelCheckpoint) -> None:
    stage, grad = passes.stages_of(llama, 2)[0], torch.ones(2, 12, zoo.HIDDEN)
    counted = Counted(stage)
    first, second = passes.tokens(0)[0], passes.tokens(1)[0]
    for ids in (first, second):
        stage.forward(ids)
    for ids in (second, first):
        stage.backward(ids.clone(), grad=grad)
    assert counted.forwards == 2
    stage.backward(first, grad=grad)
    assert counted.forwards == 3


def test_a_graph_is_measured_without_parameters_and_kept_within_the_room() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 100))
    given = torch.ones(10, 100, requires_grad=True)
    with GraphMemoryMeter([weight]) as measured:
        output = torch.relu(given @ weight)  # keeps its input, and the output of relu
    assert measured.size_bytes == given.nbytes + output.nbytes
    kept = KeptPasses(2 * measured.size_bytes)
    for _ in range(3):
        assert kept.has_room == (kept.size_bytes < 2 * measured.size_bytes - measured.size_bytes or not kept.size_bytes)
        kept.keep(KeptPass(given, output, measured.size_bytes))
    assert kept.size_bytes == 2 * measured.size_bytes
    kept.of_weights([weight])
    assert kept.size_bytes == 0
