"""Inside the blocks of a client's model, PEFT finds the modules that the whole model has, and nobody finds weights."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarm_client import RequestRejected
from swarm_client.adapters.trained import add_trained
from swarm_client.model.model import load_client
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from tests.marks import always
from tests.zoo import SUPPORTED, WITH_STATES, save_checkpoint

WEIGHTS = r"is on servers, only its shape.*neither have use_dora=True nor an init_lora_weights other than True"


def client_of(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_client(ModelCheckpoint.open(directory), AutoModelForCausalLM, dtype, torch.device("cpu"))


def is_target(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D) and in_block(name) and "experts" not in name.split(".")


def in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", path)
    return path


@pytest.fixture
def client(directory) -> PreTrainedModel:
    return client_of(directory)


# Linear layers, transposed ones, experts, and blocks with states.
@pytest.mark.parametrize("family", always("llama", "gpt2", "mixtral", "mamba2", among=SUPPORTED))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_peft_puts_the_same_layers_there(family, tmp_path):
    save_checkpoint(family, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    remote = client_of(tmp_path)
    assert [name for name, _ in remote.named_modules()] == [name for name, _ in whole.named_modules()]
    assert len(str(remote)) > len(str(whole)) / 2
    targets = [name for name, module in whole.named_modules() if is_target(name, module)]
    without = {"out_proj"} if family in WITH_STATES else set()  # PEFT refuses it in mamba
    if any(".experts" in name for name, _ in whole.named_modules()):
        without |= {"gate_proj", "up_proj", "down_proj"}  # PEFT takes them for parts of experts, wherever they are
    targets = [name for name in targets if name.rpartition(".")[2] not in without]
    results = []
    for model in (whole, remote):
        torch.manual_seed(3)
        model = peft.get_peft_model(model, LoraConfig(r=2, target_modules=targets))
        results.append([(name, p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad])
    assert len(results[1]) == len(results[0]) == 2 * len(targets)
    for (found, tensor), (name, expected) in zip(*reversed(results), strict=True):
        assert found == name and torch.equal(tensor, expected)


@pytest.mark.parametrize("family", always("llama", among=("llama", "mixtral", "gpt2")))
def test_nothing_is_counted(family, tmp_path):
    save_checkpoint(family, tmp_path)
    whole, remote = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), client_of(tmp_path)
    blocks = {name for name, _ in whole.named_parameters() if in_block(name)}
    assert [name for name, _ in remote.named_parameters()] == [
        name for name, _ in whole.named_parameters() if name not in blocks
    ]
    assert set(remote.state_dict()) == {name for name in whole.state_dict() if name not in blocks}
    assert remote.num_parameters() == sum(p.numel() for name, p in whole.named_parameters() if name not in blocks)
    assert not [name for name, _ in remote.named_buffers() if in_block(name)]
    remote.to(torch.bfloat16).train().requires_grad_(True)
    remote.gradient_checkpointing_enable()
    assert {p.dtype for p in remote.parameters()} == {torch.bfloat16}


def test_adapters_begin_with_the_dtype_of_the_model(directory):
    """PEFT rounds initial values to the dtype of the weights before it makes them float32."""
    results = []
    for model in (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16),
        client_of(directory).bfloat16(),
    ):
        torch.manual_seed(3)
        model = peft.get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        results.append([p for p in model.parameters() if p.requires_grad])
    for found, expected in zip(*reversed(results), strict=True):
        assert torch.equal(found, expected)


# ------------------------------------------------------------ what is refused


def test_a_call_says_where_blocks_are(client):
    layer = client.model.layers[3]
    hidden = torch.zeros(1, 2, 64)
    for module, name in ((layer.self_attn, "self_attn"), (layer.mlp.up_proj, "mlp.up_proj")):
        with pytest.raises(RequestRejected, match=rf"^{name} of block 3 is computed on servers.*model.blocks\[a:b\]"):
            module(hidden)
    with pytest.raises(RequestRejected, match=r"^block 3 is computed on servers: call model.blocks\[3:4\]\(hidden\)"):
        layer(hidden)
    with pytest.raises(AttributeError, match="self_attn of block 3 is computed on servers and has no 'nothing' here"):
        _ = layer.self_attn.nothing
    with pytest.raises(AttributeError, match="block 3 is computed on servers and has no 'nothing' here"):
        _ = layer.nothing


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_that_would_never_run_are_refused(client, register):
    with pytest.raises(RequestRejected, match=r"^mlp of block 5 is computed on servers, where a hook cannot run"):
        getattr(client.model.layers[5].mlp, register)(print)


def test_weights_have_shapes_and_no_values(client):
    weight = client.model.layers[2].mlp.up_proj.weight
    assert weight.shape == (96, 64) and weight.dtype == torch.float32 and weight.device == torch.device("cpu")
    for use in (lambda: weight.float(), lambda: weight.data, lambda: 2 * weight, lambda: torch.linalg.norm(weight)):
        with pytest.raises(RequestRejected, match=r"^mlp.up_proj.weight of block 2 is on servers, only its shape"):
            use()
    with pytest.raises(RequestRejected, match="cannot be copied"):
        copy.deepcopy(client.model.layers[2].mlp)


def test_parameters_of_a_block_are_those_that_peft_put_there(client):
    layer = client.model.layers[2]
    for module, name in ((layer, "block 2"), (layer.mlp, "mlp of block 2")):
        assert list(module.parameters()) == [] and next(module.parameters(), None) is None
        with pytest.raises(RequestRejected, match=f"^{name} has no parameters here, because its weights are on serv"):
            next(module.parameters())
    client.add_adapter(LoraConfig(target_modules=["up_proj"]))
    assert list(layer.parameters()) == list(layer.mlp.parameters()) == [p for _, p in layer.named_parameters()]
    assert len(list(layer.parameters())) == 2


def test_a_module_of_somebody_else_cannot_stand_there(client):
    with pytest.raises(RequestRejected, match="mlp of block 1 is computed on servers: a Identity cannot take its pl"):
        client.model.layers[1].mlp = nn.Identity()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), WEIGHTS),
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "more than a low-rank product"),
        (LoraConfig(target_modules=["q_proj"], bias="all"), "bias='all' would train weights of the servers"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), WEIGHTS),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="olora"), WEIGHTS),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="eva"), "needs the weights of the blocks"),
        (LoraConfig(target_modules=["embed_tokens", "q_proj"], init_lora_weights="olora"), WEIGHTS),
        (LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]), "target_parameters"),
        (LoraConfig(target_modules=["lm_head", "q_proj"], modules_to_save=["mlp"]), "modules_to_save"),
        (LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 3)]), "layer_replication|copied"),
        (peft.IA3Config(target_modules=["lm_head", "k_proj"], feedforward_modules=[]), "take a peft.LoraConfig"),
        (peft.LoHaConfig(target_modules=["k_proj"]), "take a peft.LoraConfig"),
        (
            peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
            "^self_attn of block 4 has no parameters here, .* take those of a peft.LoraConfig",
        ),
    ],
    ids=[
        *("dora", "lora-bias", "bias", "pissa", "olora", "eva", "embedding"),
        *("target-parameters", "modules-to-save", "replicated", "ia3", "loha", "adaption-prompt"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_servers_cannot_do_leaves_the_model_as_it_was(client, config, message):
    client.lm_head.weight.requires_grad_(False)
    modules, trained = dict(client.named_modules()), [p.requires_grad for p in client.parameters()]
    with pytest.raises(RequestRejected, match=message):
        peft.get_peft_model(client, config)
    assert dict(client.named_modules()) == modules
    assert [p.requires_grad for p in client.parameters()] == trained
    assert not hasattr(client, "peft_config")


@pytest.mark.parametrize("targets", [["w2"], ["q_proj", "w2"], "all-linear"], ids=str)
def test_experts_are_refused(targets, tmp_path):
    save_checkpoint("mixtral", tmp_path)
    client = client_of(tmp_path)
    modules = dict(client.named_modules())
    with pytest.raises(RequestRejected, match="target_modules reaches experts"):
        peft.get_peft_model(client, LoraConfig(target_modules=targets))
    assert dict(client.named_modules()) == modules


def test_a_model_with_an_adapter_of_the_servers_takes_none_from_peft_and_no_deep_prompts(client):
    client._remote_blocks[0].adapter_name = "polite"
    modules = dict(client.named_modules())
    with pytest.raises(ValueError, match="uses adapter 'polite' of the servers: it cannot have another"):
        peft.get_peft_model(client, LoraConfig(target_modules=["q_proj"]))
    assert dict(client.named_modules()) == modules
    with pytest.raises(ValueError, match="uses adapter 'polite' of the servers: deep prompts cannot be added"):
        client.add_prompts("deep_prompt", 2)


def test_a_directory_without_an_adapter_is_refused(client, tmp_path):
    with pytest.raises(ValueError, match=r"has neither adapter_config.json nor prompts.safetensors"):
        add_trained(client, tmp_path)


def test_an_adapter_that_is_refused_leaves_the_one_before(client):
    client.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    names = [name for name, p in client.named_parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="not supported"):
        client.add_adapter(LoraConfig(target_modules=["v_proj", "input_layernorm"]), "other")
    assert client.active_adapters() == ["default"]
    assert [name for name, p in client.named_parameters() if p.requires_grad] == names
    client.add_adapter(LoraConfig(target_modules=["v_proj"]), "other")
