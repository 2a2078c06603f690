"""Layers between stages: gradients beside one graph of the stock model with the same layers; what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarm_training.optim.by_name import optimizer_by_name
from swarm_training.run.state import TrainedState
from swarm_training.stages.compress.layers import boundary
from swarm_training.stages.engine.boundaries import FILE_NAME, install_boundaries, save_boundaries
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.export import export
from swarm_training.stages.engine.settings import BoundarySettings, Scratch, StageOptions
from swarm_training.stages.engine.stage import Stage
from tests import zoo
from tests.unit.training.stages.engine import passes

BLOCKS = {"llama": "model.layers", "bloom": "transformer.h"}


def options(layers: str, precision: str = "fp32", seed: int = 3) -> StageOptions:
    return StageOptions(precision=precision, boundaries=BoundarySettings(layers, seed))


def moved(stages: list[Stage]) -> list[Stage]:
    """Norms no longer at their first values; what two stages have stays equal."""
    with torch.no_grad():
        for stage in stages:
            for name, each in zip(stage.names, stage.parameters, strict=True):
                if name.startswith("boundary."):
                    each += 0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel()))
    return stages


def with_layers(model: Any, name: str, layers: str, stages: list[Stage]) -> Any:
    """The stock model in one graph with the stages' layers: after the last block of every stage but the last."""
    state = {name: each for stage in stages for name, each in stage.state().items()}
    model.boundary = nn.ModuleDict()
    for stage in stages[:-1]:
        block = stage.span.end
        down, up = boundary(layers, zoo.HIDDEN)
        model.boundary[str(block)] = nn.ModuleDict({"down": down, "up": up})

        def passed(_block: nn.Module, _inputs: Any, output: Any, down: nn.Module = down, up: nn.Module = up) -> Any:
            return (up(down(output[0])), *output[1:]) if isinstance(output, tuple) else up(down(output))

        model.get_submodule(f"{BLOCKS[name]}.{block - 1}").register_forward_hook(passed)
    model.load_state_dict(state, strict=False)
    assert state.keys() >= {name for name, _ in model.boundary.named_parameters(prefix="boundary")}
    return model


@pytest.mark.parametrize("name", ["llama", "bloom"])  # whose blocks return a tensor, and a tuple
@pytest.mark.parametrize("layers", ["bottleneck:4", "maxout:2"])
def test_gradients_are_those_of_one_process_with_the_same_layers(name: str, layers: str, tmp_path: Path) -> None:
    checkpoint = passes.open_zoo(name, tmp_path)
    stages = moved(passes.stages_of(checkpoint, 3, options(layers)))
    assert [stage.width for stage in stages] == [zoo.HIDDEN // int(layers[-1])] * 3
    ids, labels = passes.tokens()
    hidden = stages[0].forward(ids).hidden
    assert hidden is not None and hidden.shape == (2, 12, stages[0].width)
    loss, expected = passes.gradients_of(with_layers(passes.whole(str(tmp_path)), name, layers, stages), ids, labels)
    loss_sum, found = passes.through(stages, ids, labels, passes.num_targets(labels))
    assert loss_sum == pytest.approx(loss * passes.num_targets(labels), rel=1e-6)
    assert found.keys() == expected.keys() and any(each.startswith("boundary.") for each in found)
    for each in expected:
        torch.testing.assert_close(found[each], expected[each], rtol=1e-4, atol=1e-7)
        assert found[each].any(), each


def test_they_begin_alike_at_every_peer_and_follow_from_the_seed() -> None:
    config = zoo.make_config("llama")
    first, again, other = (
        [stage.state() for stage in passes.stages_of(Scratch(config), 3, options("bottleneck:4", seed=seed))]
        for seed in (1, 1, 2)
    )
    for stage, same, different in zip(first, again, other, strict=True):
        matrices = [each for each in stage if each.startswith("boundary.") and stage[each].dim() == 2]
        assert matrices and all(torch.equal(stage[each], same[each]) for each in stage)
        assert not any(torch.equal(stage[each], different[each]) for each in matrices)
    downs = [each for stage in first for name, each in stage.items() if name.endswith("down.1.weight")]
    assert len(downs) == 2 and not torch.equal(*downs)


def test_they_are_trained_in_fp32_and_compute_in_bf16() -> None:
    stage = build_stage(Scratch(zoo.make_config("llama")), 0, 3, options("bottleneck:4", "bf16"))
    state = TrainedState(stage.parameters, optimizer_by_name("sgd", stage.parameters, lr=1.0))
    ids, _ = passes.tokens()
    hidden = stage.forward(ids).hidden
    assert hidden is not None and hidden.dtype == torch.bfloat16 and hidden.shape == (2, 12, 16)
    found = stage.backward(ids, grad=torch.ones(2, 12, 16))
    state.apply(torch.cat([each.flatten().float() for each in found.parameters]))
    assert all(each.dtype == torch.float32 for each in stage.parameters)
    assert not torch.equal(stage.forward(ids).hidden, hidden)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_an_export_with_its_layers_is_what_was_trained(name: str, tmp_path: Path) -> None:
    config = zoo.make_config(name)
    stages = moved(passes.stages_of(Scratch(config, seed=2), 3, options("maxout:4")))
    export((stage.state() for stage in stages), config, tmp_path, layers="maxout:4")
    hidden, _ = ids, _ = passes.tokens()
    for stage in stages[:-1]:
        hidden = stage.forward(hidden).hidden  # type: ignore[assignment]  # none of them is the last
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        expected = stages[-1]._run(hidden)
        assert not torch.allclose(model.eval()(ids, use_cache=False).logits, expected, atol=1e-3)
        install_boundaries(model, tmp_path)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=0)
    names = {each for stage in stages for each in stage.names if each.startswith("boundary.")}
    assert load_file(tmp_path / FILE_NAME).keys() == names


def test_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = zoo.make_config("llama")
    with pytest.raises(ValueError, match=f"maxout:7 cannot stand between stages of hidden size {zoo.HIDDEN}"):
        build_stage(Scratch(config), 0, 2, options("maxout:7"))
    states: list[dict[str, Tensor]] = [
        stage.state() for stage in passes.stages_of(Scratch(config), 2, options("maxout:2"))
    ]
    with pytest.raises(ValueError, match=r"stage 0 has a tensor boundary\.3\.down"):
        export(states, config, tmp_path)  # nobody has said that there are layers
    stock = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="has no layers of boundaries that can be read"):
        install_boundaries(stock, tmp_path)
    export(states, config, tmp_path, layers="maxout:2")
    other = AutoModelForCausalLM.from_config(zoo.make_config("llama", num_hidden_layers=2))
    with pytest.raises(ValueError, match="are of another model"):
        install_boundaries(other, tmp_path)
    save_boundaries(load_file(tmp_path / FILE_NAME), "funnel:2", tmp_path)
    with pytest.raises(ValueError, match="layers 'funnel:2' between stages are unknown"):
        install_boundaries(stock, tmp_path)


def test_none_is_the_stock_model() -> None:
    config = zoo.make_config("llama")
    plain, named = (passes.stages_of(Scratch(config), 2, each) for each in (None, options("none")))
    assert [stage.names for stage in plain] == [stage.names for stage in named]
    assert all(stage.width == zoo.HIDDEN for stage in named)
