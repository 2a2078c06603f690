"""Adapters that ``peft`` has saved: read as what PEFT reads, or refused with the reason."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.peft_files import CONFIG_NAME, WEIGHTS_NAME, named_patterns, read_adapter
from swarm_protocol.errors import CheckpointError
from swarm_protocol.span import Span
from swarm_server.engine.preloaded import check_adapters
from tests.adapted import LocalModel
from tests.unit.client.adapters.test_lora import TARGETS
from tests.zoo import BLOCKS, make_config, save_checkpoint

WHOLE = Span(0, BLOCKS)


@pytest.mark.parametrize("family", TARGETS)
def test_it_is_what_peft_saved(family, tmp_path):
    save_checkpoint(family, tmp_path / "model")
    targets = TARGETS[family]
    options = {
        "llama": dict(use_rslora=True),
        "gpt2": dict(rank_pattern={"c_proj": 2}, alpha_pattern={r"h\.[1-3]\.attn\.c_proj": 5}, fan_in_fan_out=True),
        "opt": dict(use_rslora=True, rank_pattern={"fc1": 2}, alpha_pattern={"layers.2.fc1": 3, "fc1": 7}),
        "mixtral": dict(layers_to_transform=[1, 2]),
    }
    local = LocalModel.load(
        tmp_path / "model", r=4, lora_alpha=6, lora_dropout=0.1, target_modules=targets, **options.get(family, {})
    )
    local.peft.save_pretrained(tmp_path / "saved")
    config = ModelCheckpoint.open(tmp_path / "model").config
    adapter = read_adapter(tmp_path / "saved", local.family)
    expected = LocalModel.saved(tmp_path / "model", tmp_path / "saved").adapter(WHOLE, dropout=0.1)
    assert len(adapter.low_rank) == len(expected.low_rank) > 0
    by_place = {(part.block, part.module): part for part in adapter.low_rank}
    for part in expected.low_rank:
        read = by_place[part.block, part.module]
        assert (read.scaling, read.dropout) == (part.scaling, part.dropout)
        assert torch.equal(read.a, part.a) and torch.equal(read.b, part.b)
    check_adapters([tmp_path / "saved"], local.family, config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint("llama", directory / "model")
    local = LocalModel.load(directory / "model", r=2, target_modules=["q_proj"])
    local.peft.save_pretrained(directory / "adapter")
    return directory / "adapter"


FAMILY = describe(make_config("llama"))


def test_blocks_of_a_vision_tower_are_refused(saved, tmp_path):
    inside = load_file(saved / WEIGHTS_NAME)
    tower = {name.replace("model.layers", "vision_tower.encoder.layers"): tensor for name, tensor in inside.items()}
    assert not tower.keys() & inside.keys()
    with pytest.raises(CheckpointError, match=r"changes blocks of '.*model\.' and of '.*vision_tower\.encoder\.'"):
        read_adapter(changed(saved, tmp_path, tensors=tower), FAMILY)


def changed(saved: Path, tmp_path: Path, *, tensors: dict[str, torch.Tensor] | None = None, **config) -> Path:
    """A copy of the adapter with another config, or with other or further tensors."""
    written = json.loads((saved / "adapter_config.json").read_text()) | config
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    save_file(load_file(saved / "adapter_model.safetensors") | (tensors or {}), tmp_path / "adapter_model.safetensors")
    return tmp_path


CONFIGS = {
    "another type": (dict(peft_type="IA3"), "PEFT's type 'IA3': expected LORA"),
    "dora": (dict(use_dora=True), "uses use_dora, which scales weights by their magnitude"),
    "bias": (dict(bias="lora_only"), r"trains biases \(bias='lora_only'\): expected 'none'"),
    "bias of lora": (dict(lora_bias=True), "uses lora_bias, which trains biases"),
    "modules": (dict(modules_to_save=["lm_head"]), "uses modules_to_save, which trains whole modules"),
    "tokens": (dict(trainable_token_indices=[1]), "uses trainable_token_indices"),
    "parameters": (dict(target_parameters=["experts.down_proj"]), "uses target_parameters, which adapts parameters"),
    "pissa": (dict(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the model's own weights"),
    "alpha": (dict(lora_alpha="much"), r"adapter_config\.json has lora_alpha='much': expected a number above 0"),
    "no alpha": (dict(lora_alpha=None), "lora_alpha=None: expected a number above 0"),
    "alpha of nothing": (dict(lora_alpha=0), "lora_alpha=0: expected a number above 0"),
    "infinite alpha": (dict(lora_alpha=inf), "lora_alpha=inf: expected a finite number"),
    "huge alpha": (dict(lora_alpha=1e300), r"lora_alpha=1e\+300: expected a number above 0, at most 1000000"),
    "dropout": (dict(lora_dropout=1.5), "lora_dropout=1.5: expected a number of at least 0, below 1"),
    "dropout of all": (dict(lora_dropout=1), "lora_dropout=1: expected a number of at least 0, below 1"),
    "rank": (dict(r=0), "r=0: expected a whole number of at least 1"),
    "huge rank": (dict(r=10**99), "r=10{59}…: expected a whole number"),
    "scaling": (dict(use_rslora="no"), "use_rslora='no': expected true or false"),
    "pattern of alpha": (
        dict(alpha_pattern={"q_proj": -1}),
        r"alpha_pattern\['q_proj'\]=-1: expected a number above 0",
    ),
    "pattern of rank": (dict(rank_pattern={"q_proj": "2"}), r"rank_pattern\['q_proj'\]='2': expected a whole number"),
    "no patterns": (dict(alpha_pattern=["q_proj"]), r"alpha_pattern=\['q_proj'\]: expected an object of names and num"),
    "infinity elsewhere": (dict(eva_config={"rho": inf}), "rho=inf: expected a finite number"),
    "lookahead": (
        dict(alpha_pattern={"(?=q)q_proj": 1}),
        r"pattern '\(\?=q\)q_proj' that cannot be used: 'invalid perl operator: \(\?='",
    ),
    "long": (dict(alpha_pattern={"(a+)+" * 300: 1}), "cannot be used: it has 1510 characters"),
    "many expressions": (dict(alpha_pattern={f"{'(a+)+' * n}": 1 for n in range(1, 99)}), "has too many patterns"),
    "many names": (
        dict(alpha_pattern={str(n): 1 for n in range(9999)}),
        "has too many patterns: expected at most 4096",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_refused(saved, tmp_path, name):
    config, sentence = CONFIGS[name]
    with pytest.raises(CheckpointError, match=sentence):
        read_adapter(changed(saved, tmp_path, **config), FAMILY)


Q = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
TENSORS = {
    "head": ({"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 64)}, "'lm_head', which is not inside"),
    "magnitudes": (
        {Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)},
        "expected lora_A and lora_B",
    ),
    "bias": ({Q.replace("lora_A.weight", "lora_B.bias"): torch.zeros(64)}, "expected lora_A and lora_B"),
    "rank": ({Q: torch.zeros(3, 64)}, "no lora_A and lora_B of one rank for 'model.layers.3.self_attn.q_proj'"),
    "alone": ({Q.replace("q_proj", "v_proj"): torch.zeros(2, 64)}, "no lora_A and lora_B of one rank"),
    "vector": ({Q: torch.zeros(64)}, "no matrix"),
    "nothing": ({Q: torch.zeros(0, 64), Q.replace("_A", "_B"): torch.zeros(64, 0)}, r"of shape \[0, 64\]: no matrix"),
    "nan": ({Q: torch.full((2, 64), float("nan"))}, "is not finite"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_refused(saved, tmp_path, name):
    tensors, sentence = TENSORS[name]
    with pytest.raises(CheckpointError, match=sentence):
        read_adapter(changed(saved, tmp_path, tensors=tensors), FAMILY)


def test_what_does_not_fit_the_model(saved, tmp_path):
    wide = {Q: torch.zeros(2, 65)}
    deep = {Q.replace("3", "9"): torch.zeros(2, 64), Q.replace("3", "9").replace("_A", "_B"): torch.zeros(64, 2)}
    for number, (tensors, sentence) in enumerate(((wide, r"expected \[rank, 64\]"), (deep, "for block 9"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(ValueError, match=f"adapter .* does not fit the model: .*{sentence}"):
            check_adapters([changed(saved, directory, tensors=tensors)], FAMILY, make_config("llama"))


def test_what_is_no_adapter(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, FAMILY)
    for text, sentence in (
        ("{", r"adapter_config\.json is no valid JSON"),
        ("[" * 100_000, r"adapter_config\.json is no valid JSON: it is nested too deeply"),
        ("[]", r"adapter_config\.json holds a JSON list, expected an object"),
        ('{"peft_type": {}}', r"PEFT's type \{\}: expected LORA"),
    ):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=sentence):
            read_adapter(tmp_path, FAMILY)
    (tmp_path / "adapter_config.json").write_text((saved / "adapter_config.json").read_text())
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        read_adapter(tmp_path, FAMILY)


def test_a_link_to_somewhere_else_is_refused_but_for_weights(saved, tmp_path):
    directory = tmp_path / "adapter"
    directory.mkdir()
    changed(saved, directory)
    num_modules = len(read_adapter(directory, FAMILY).low_rank)
    for number, name in enumerate((WEIGHTS_NAME, CONFIG_NAME)):
        assert len(read_adapter(directory, FAMILY).low_rank) == num_modules
        elsewhere = tmp_path / str(number)
        elsewhere.mkdir()
        (directory / name).rename(elsewhere / name)
        (directory / name).symlink_to(elsewhere / name)
    message = rf"{CONFIG_NAME} is a link to .*, outside .*adapter: expected the file itself"
    with pytest.raises(CheckpointError, match=message):
        read_adapter(directory, FAMILY)


def test_adapters_that_peft_really_writes_and_we_refuse(tmp_path):
    save_checkpoint("llama", tmp_path / "model")
    for number, config in enumerate(
        (
            LoraConfig(target_modules=["q_proj"], use_dora=True),
            LoraConfig(target_modules=["q_proj"], bias="all"),
            LoraConfig(target_modules=["q_proj", "lm_head"]),
            LoraConfig(target_modules=["q_proj"], init_lora_weights="olora"),
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        )
    ):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        get_peft_model(model, config).save_pretrained(tmp_path / str(number))
        with pytest.raises(CheckpointError) as caught:
            read_adapter(tmp_path / str(number), FAMILY)
        assert "\n" not in str(caught.value)


PATTERNS = {  # of models whose modules are called model.layers.3.self_attn.q_proj
    "names": {"q_proj": 3, "down_proj": 5},
    "whole names": {"model.layers.1.self_attn.q_proj": 3, "layers.2.self_attn.q_proj": 5, "self_attn.q_proj": 7},
    "ends of names": {"proj": 3, "attn.q_proj": 5},
    "the first counts": {".*q_proj": 3, "q_proj": 5, ".*": 7},
    "beginnings": {"^model.layers.1.self_attn.q_proj": 3, "^layers.2.self_attn.q_proj": 5},
    "numbers": {r"layers\.[0-3]\.self_attn\.q_proj": 3, r"layers\.\d+\.mlp\.(up|down)_proj": 5},
    "alternatives": {"(q_proj|up_proj)": 3, r"layers.(0|[4-5])\..*": 5},
    "parts": {".*self_attn.*": 3, r".*\.layers\..*?\.mlp\..*": 5},
    "more than the key": {"nothing)|(model.layers.3": 3},
    "repeated": {r"model\.layers\.[1-2]{1,2}\.(self_attn|mlp)\.(?:q|up)_proj": 3},
    "hang": {r"(([a-z_.0-9]+)+)+!": 3, "(.*)*(.*)*(.*)*x": 5, "q_proj": 7},
}


def scalings(model) -> dict[str, tuple[int, float]]:
    """Rank and scaling of each layer that PEFT has put into a model, by name."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and module.lora_A}
    return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in layers.items()}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_mean_what_they_do_in_peft(name, tmp_path):
    save_checkpoint("llama", tmp_path / "model")
    options = dict(alpha_pattern=PATTERNS[name], rank_pattern={r"layers\.[24]\..*": 3, "up_proj": 2})
    options["target_modules"] = r".*\.(self_attn\.q_proj|mlp\.(up|down)_proj)"
    if name == "hang":  # what PEFT itself would hang on has no influence
        options["alpha_pattern"] = {"q_proj": 7}
    config = LoraConfig(r=4, lora_alpha=6, **options)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    peft = get_peft_model(base, config)
    peft.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    written["alpha_pattern"] = PATTERNS[name]
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(written))
    expected = scalings(peft.base_model.model)
    assert len(expected) == 3 * BLOCKS and len(set(expected.values())) > 1

    adapter = read_adapter(tmp_path / "saved", FAMILY)
    read = {f"model.layers.{part.block}.{part.module}": (len(part.a), part.scaling) for part in adapter.low_rank}
    assert read == expected

    named = {
        option: named_patterns(written[option], expected, tmp_path / "saved")
        for option in ("rank_pattern", "alpha_pattern")
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again = get_peft_model(again, LoraConfig(r=4, lora_alpha=6, target_modules=list(expected), **named))
    assert scalings(again.base_model.model) == expected


def test_what_is_left_of_a_pattern():
    modules = ["layers.0.q_proj", "layers.1.q_proj", "layers.1.v_proj"]
    patterns = {"q_proj": 1, r"layers\.1\..*": 2, "(a+)+$": 3}
    assert named_patterns(patterns, modules, Path("x")) == {
        "q_proj": 1,
        r"^(?:layers\.1\.q_proj|layers\.1\.v_proj)": 2,
    }
