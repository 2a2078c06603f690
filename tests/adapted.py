"""What plain ``peft`` computes on the local model, and the same adapter as it travels to servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import Family
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank
from tests.zoo import VOCAB

SALT = b"0123456789abcdef"


@dataclass
class LocalModel:
    """A model with an adapter of PEFT's, both of random weights."""

    peft: PeftModel
    family: Family

    @classmethod
    def load(cls, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> LocalModel:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            peft = get_peft_model(model, LoraConfig(**config)).eval()
            for name, parameter in peft.named_parameters():
                if "lora_" in name:
                    nn.init.normal_(parameter, std=0.2)
        return cls(peft, ModelCheckpoint.open(directory).family)

    @classmethod
    def saved(cls, directory: Path, adapter: Path) -> LocalModel:
        """With an adapter that PEFT has saved."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return cls(PeftModel.from_pretrained(model, adapter), ModelCheckpoint.open(directory).family)

    @property
    def blocks(self) -> nn.ModuleList:
        base = self.peft.base_model.model.base_model
        return getattr(self.family.owner_of(base), self.family.blocks)

    def layers(self, span: Span) -> list[tuple[int, str, nn.Module]]:
        """PEFT's LoRA layers: block, path inside it, and the layer."""
        return [
            (block, path, module)
            for block in span
            for path, module in self.blocks[block].named_modules()
            if hasattr(module, "lora_A") and len(module.lora_A)
        ]

    def adapter(self, span: Span, salt: bytes = SALT, dropout: float = 0.0) -> Adapter:
        """What of it lies in these blocks."""
        parts = tuple(
            LowRank(
                block,
                path,
                layer.scaling["default"],
                layer.lora_A["default"].weight.detach(),
                layer.lora_B["default"].weight.detach(),
                dropout,
            )
            for block, path, layer in self.layers(span)
        )
        return Adapter(salt, parts)

    def run(self, span: Span, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states after ``span``, given those before."""
        outputs = []
        before = self.blocks[span.start].register_forward_pre_hook(lambda _block, inputs: (hidden, *inputs[1:]))
        after = self.blocks[span.end - 1].register_forward_hook(lambda _block, _inputs, output: outputs.append(output))
        ids = torch.randint(3, VOCAB, hidden.shape[:2], generator=torch.Generator().manual_seed(0))
        try:
            self.peft(input_ids=ids, attention_mask=mask, use_cache=False)
        finally:
            before.remove()
            after.remove()
        (output,) = outputs
        return output[0] if isinstance(output, tuple) else output

    def gradients(
        self, span: Span, hidden: torch.Tensor, upstream: torch.Tensor, mask: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Of the input, then of a and b of each layer."""
        leaf = hidden.clone().requires_grad_()
        matrices = [
            matrix["default"].weight for _, _, layer in self.layers(span) for matrix in (layer.lora_A, layer.lora_B)
        ]
        return list(torch.autograd.grad(self.run(span, leaf, mask), [leaf, *matrices], upstream))
