"""The same adapter twice: with plain PEFT on the whole model in this process, and in remote blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, ends_only_at_its_length
from tests.zoo import PAD, VOCAB

SEED = 5


@dataclass(frozen=True)
class Tuned:
    """``local`` is PEFT's, ``remote`` the distributed model, with adapters that began alike."""

    local: PeftModel
    remote: PreTrainedModel | PeftModel

    @property
    def models(self) -> tuple[PeftModel, PreTrainedModel | PeftModel]:
        return self.local, self.remote

    @property
    def parameters(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """What is trained, in the order of blocks."""
        local, remote = (trained(model) for model in self.models)
        return local, remote

    def train(self, steps: int, loss: Callable[[Any], torch.Tensor]) -> None:
        """Equal steps of both; B leaves its zeros, so that A has a gradient. (Adam would blow up roundings.)"""
        for model in self.models:
            optimizer = torch.optim.SGD(trained(model), lr=0.05)
            for _ in range(steps):
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()

    def assert_same_weights(self) -> None:
        for local, remote in zip(*self.parameters, strict=True):
            assert_close(remote, local)

    def assert_same_logits(self, **batch: torch.Tensor) -> None:
        with torch.no_grad():
            local, remote = (model.eval()(**batch).logits for model in self.models)
        assert_close(remote, local)


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def whole_model(directory: Path) -> PreTrainedModel:
    return ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))


def lora(targets: Any = ("q_proj", "v_proj"), **options: Any) -> LoraConfig:
    targets = targets if isinstance(targets, str) else list(targets)
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": targets, **options})


@contextmanager
def tuned(servers: InProcessServers, config: LoraConfig, *, wraps: bool = False, **options: Any) -> Iterator[Tuned]:
    """``options`` are those of the client. ``wraps``: in a wrapper of PEFT too, instead of by ``add_adapter``."""
    with connected(servers, **options) as remote:
        torch.manual_seed(SEED)
        local = get_peft_model(whole_model(servers.model), copy.deepcopy(config))
        torch.manual_seed(SEED)
        if wraps:
            remote = get_peft_model(remote, copy.deepcopy(config))
        else:
            remote.add_adapter(copy.deepcopy(config))
        yield Tuned(local.eval(), remote.eval())  # servers do not apply the dropout of the model itself


def padded_batch(rows: int = 3, tokens: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids, mask and labels; the first row is padded on its left."""
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(**batch: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda model: model(**batch).loss


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    """Equal but for the rounding of sums in another order."""
    assert found.shape == expected.shape
    difference = float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-6))
    assert difference <= relative, f"a relative difference of {difference:.2g}"
