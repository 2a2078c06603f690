"""One stage: precision, memory, what it reads, what it refuses; training in stages beside one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.safetensors_file import FileTensor, StoredTensor
from swarm_protocol.errors import RequestRejected
from swarm_training.optim.by_name import optimizer_by_name
from swarm_training.run.state import TrainedState
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.settings import Scratch, StageOptions
from swarm_training.stages.engine.stage import Stage
from tests import zoo
from tests.unit.training.stages.engine import passes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelCheckpoint:
    return passes.open_zoo("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def stages(llama: ModelCheckpoint) -> list[Stage]:
    return passes.stages_of(llama, 3)


def test_forward_is_what_backward_computes(stages: list[Stage]) -> None:
    ids, labels = passes.tokens()
    hidden = stages[0].forward(ids).hidden
    assert hidden is not None and hidden.shape == (2, 12, zoo.HIDDEN) and not hidden.requires_grad
    second = stages[1].forward(hidden).hidden
    assert second is not None
    output = stages[2].forward(second, labels)
    found = stages[2].backward(second, labels)
    assert output.loss_sum is not None and output.loss_sum.dtype == torch.float64 and output.loss_sum.shape == ()
    assert (float(output.loss_sum), output.num_tokens) == (found.loss_sum, found.num_tokens)
    assert found.num_tokens == passes.num_targets(labels)
    assert all(each.grad is None for stage in stages for each in stage.parameters)


def test_micro_batches_add_up_to_the_mean_over_all_tokens(llama: ModelCheckpoint, stages: list[Stage]) -> None:
    """Though they have different numbers of tokens that count."""
    batches = [passes.tokens(seed) for seed in range(3)]
    num_tokens = sum(passes.num_targets(labels) for _, labels in batches)
    ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    _, expected = passes.gradients_of(passes.whole(llama.location), ids, labels)
    parts = [passes.through(stages, *batch, loss_scale=num_tokens)[1] for batch in batches]
    for name, gradient in expected.items():
        torch.testing.assert_close(sum(part[name] for part in parts), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_computes_what_the_stock_model_does_in_bf16(name: str, tmp_path: Path) -> None:
    checkpoint = passes.open_zoo(name, tmp_path)
    stages = passes.stages_of(checkpoint, 2, StageOptions(precision="bf16"))
    ids, labels = passes.tokens()
    hidden = stages[0].forward(ids).hidden
    assert hidden is not None and hidden.dtype == torch.bfloat16
    _, expected = passes.gradients_of(passes.whole(str(tmp_path), torch.bfloat16), ids, labels)
    _, found = passes.through(stages, ids, labels, passes.num_targets(labels))
    assert all(gradient.dtype == torch.bfloat16 for gradient in found.values())
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    loaded = passes.whole(str(tmp_path)).state_dict()
    for stage in stages:
        assert all(each.dtype == torch.float32 for each in stage.parameters)
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in stage.state().items())  # nothing was rounded


def saved_bytes(run: Callable[[], object]) -> int:
    """Of the tensors that autograd keeps at a time, at most."""
    held: dict[int, int] = {}
    most = 0

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor = tensor
            held[id(self)] = tensor.numel() * tensor.element_size()
            most = max(most, sum(held.values()))

        def __del__(self) -> None:
            del held[id(self)]

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda kept: kept.tensor):
        run()
    return most


@pytest.mark.parametrize("name", ["llama", "bloom"])  # whose blocks return a tensor, and a tuple
def test_checkpointed_activations_change_no_bit_and_take_less_memory(name: str, tmp_path: Path) -> None:
    checkpoint = passes.open_zoo(name, tmp_path)
    plain, lean = (build_stage(checkpoint, 0, 1, StageOptions(checkpoint_activations=lean)) for lean in (False, True))
    ids, labels = passes.tokens()
    expected, found = plain.backward(ids, labels), lean.backward(ids, labels)
    assert all(map(torch.equal, found.parameters, expected.parameters))
    most, less = (saved_bytes(lambda stage=stage: stage.backward(ids, labels)) for stage in (plain, lean))
    assert less < 0.5 * most


def test_only_what_a_stage_has_is_read(llama: ModelCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = FileTensor.read

    def recorded(tensor: FileTensor) -> Tensor:
        read.append(tensor.name)
        return original(tensor)

    monkeypatch.setattr(FileTensor, "read", recorded)
    found: list[str] = []
    stored = ModelCheckpoint.stored

    def looked_up(checkpoint: ModelCheckpoint, want: Callable[[str], bool]) -> dict[str, StoredTensor]:
        tensors = stored(checkpoint, want)
        found.extend(tensors)
        return tensors

    monkeypatch.setattr(ModelCheckpoint, "stored", looked_up)
    for index in range(3):
        read.clear()
        found.clear()
        stage = build_stage(llama, index, 3)
        assert sorted(read) == sorted(stage.names)
        assert index != 1 or sorted(found) == sorted(read)  # of a model on the hub, shards would be downloaded


@pytest.mark.parametrize(("name", "tied"), [("adamw", True), ("lamb8bit", False)])
def test_steps_are_those_of_one_process(name: str, tied: bool) -> None:
    """Bit by bit; where embeddings are tied, with the gradients of both stages added."""
    config = zoo.make_config("llama", num_hidden_layers=2, tie_word_embeddings=tied)
    runs = [passes.stages_of(Scratch(config, seed=1), number) for number in (1, 2)]
    for stages in runs:
        states = [TrainedState(each.parameters, optimizer_by_name(name, each.parameters, lr=1e-2)) for each in stages]
        for step in range(3):
            _, gradients = passes.through(stages, *passes.tokens(step), loss_scale=16)
            for stage, state in zip(stages, states, strict=True):
                state.apply(torch.cat([gradients[each].flatten() for each in stage.names]))
    alone, together = ({k: v for stage in stages for k, v in stage.state().items()} for stages in runs)
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[each], together[each]) for each in alone)
    begin = passes.stages_of(Scratch(config, seed=1), 1)[0].state()
    assert not any(torch.equal(alone[each], begin[each]) for each in alone)
    first, last = (stage.state() for stage in runs[1])
    assert all(torch.equal(first[each], last[each]) for each in runs[1][0].shared)


def test_router_losses_are_left_out() -> None:
    """They would need the routers of all stages; asked for by the config, they must not break the rest."""
    config = zoo.make_config("mixtral", num_hidden_layers=2, output_router_logits=True)
    ids, labels = passes.tokens()
    losses = [passes.through(passes.stages_of(Scratch(config), number), ids, labels)[0] for number in (1, 2)]
    assert losses[0] == losses[1]


IDS, LABELS = passes.tokens()
HIDDEN = torch.zeros(2, 12, zoo.HIDDEN)


@pytest.mark.parametrize(
    ("index", "arguments", "sentence"),
    [
        (0, (HIDDEN,), "inputs are .* in float32: expected token ids"),
        (0, (IDS.int(),), "in int32: expected token ids of shape .* in int64"),
        (0, (IDS[:, :0],), "expected token ids"),
        (0, (IDS + zoo.VOCAB,), "expected 0 to 127"),
        (0, (-IDS,), "inputs have the token -"),
        (0, (IDS.repeat(1, 30),), "360 positions: the model has 256"),
        (1, (IDS,), r"stage 1 expects hidden states of shape \[batch, positions, 64\]"),
        (1, (HIDDEN[..., 1:],), "stage 1 expects hidden states"),
        (1, (HIDDEN.int(),), "stage 1 expects hidden states"),
        (1, (HIDDEN[:0],), "no positions"),
        (2, (HIDDEN,), "labels are missing"),
        (2, (HIDDEN, LABELS[:, 1:]), r"expected token ids of shape \[2, 12\]"),
        (2, (HIDDEN, LABELS + zoo.VOCAB), "labels have the token"),
    ],
)
def test_wrong_inputs_are_refused(
    stages: list[Stage], index: int, arguments: tuple[Tensor, ...], sentence: str
) -> None:
    for compute in (stages[index].forward, stages[index].backward):
        with pytest.raises(RequestRejected, match=sentence):
            compute(*arguments)


def test_wrong_gradients_are_refused(stages: list[Stage]) -> None:
    with pytest.raises(RequestRejected, match="grad is missing: stage 1 expects"):
        stages[1].backward(HIDDEN)
    with pytest.raises(RequestRejected, match=r"grad is \[1, 12, 64\] in float32"):
        stages[1].backward(HIDDEN, grad=HIDDEN[:1])
    with pytest.raises(RequestRejected, match="the last stage has the loss"):
        stages[2].backward(HIDDEN, LABELS, HIDDEN)
    with pytest.raises(RequestRejected, match="loss_scale is 0"):
        stages[2].backward(HIDDEN, LABELS, loss_scale=0)
