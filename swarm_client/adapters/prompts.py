"""Prompts: trained virtual tokens before the input. Deep prompts are also added before every block."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.peft_files import WEIGHTS_NAME
from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.wire.adapters import Prompt

if TYPE_CHECKING:  # the class that the mixin extends
    from transformers import PreTrainedModel as StockModel
else:
    StockModel = object

TUNING_MODES = ("prompt", "deep_prompt")
NEW_HEADS = ("score.", "classifier.")  # heads of classifiers that must still be trained
PROMPTS_FILE, PEFT_KEY = "prompts.safetensors", "prompt_embeddings"


class Prompts(nn.Module):
    """The parameters of prompts, and their effect on the input of a model without its head.

    Attributes:
        embedding: [num_tokens, width of the token embedding], the virtual tokens before the tokens of every row.
        deep: [blocks, num_tokens, hidden_size], added to the virtual tokens' hidden states before each block; None for
            shallow prompts.
    """

    def __init__(self, embedding: torch.Tensor, deep: torch.Tensor | None = None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding)
        self.deep = None if deep is None else nn.Parameter(deep)

    @property
    def num_tokens(self) -> int:
        return len(self.embedding)

    def of_blocks(self) -> Iterator[Prompt]:
        for block, values in enumerate(() if self.deep is None else self.deep):
            yield Prompt(block, values)

    def before(self, given: dict[str, Any], embed: nn.Module, past: int) -> dict[str, Any]:
        """Return the arguments of a forward, with the virtual tokens first unless there are earlier positions.

        Args:
            given: the arguments without virtual tokens.
            past: the number of earlier positions, including virtual ones.
        """
        given, num = dict(given), self.num_tokens
        embeddings = given.get("inputs_embeds")
        if embeddings is None:
            embeddings = embed(given["input_ids"])
        rows, new, _ = embeddings.shape
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None:  # it covers earlier positions too, so the virtual ones are always missing in it
            given["attention_mask"] = torch.cat([mask.new_ones(rows, num), mask], 1)
        if positions is not None:
            given["position_ids"] = positions + num
        if past:  # the virtual tokens are in the cache
            if positions is None and "position_ids" in given:
                given["position_ids"] = torch.arange(past, past + new, device=embeddings.device)[None]
            return given
        if positions is not None:
            virtual = torch.arange(num, device=positions.device).expand(len(positions), -1)
            given["position_ids"] = torch.cat([virtual, given["position_ids"]], 1)
        virtual = self.embedding.to(embeddings.dtype).expand(rows, -1, -1)
        given["inputs_embeds"] = torch.cat([virtual, embeddings], 1)
        given["input_ids"] = None
        return given

    def without(self, output: Any) -> Any:
        """Return the forward's output without virtual tokens: hidden states, alone or in tuples and other outputs."""
        if isinstance(output, torch.Tensor):
            return output[:, self.num_tokens :] if output.ndim == 3 else output
        if isinstance(output, tuple):
            return tuple(map(self.without, output))
        if isinstance(output, dict):
            for name in ("last_hidden_state", "hidden_states"):
                if output.get(name) is not None:
                    output[name] = self.without(output[name])
        return output


class PromptsMixin(StockModel):
    """A mixin for the prompts of a model whose blocks are remote."""

    _remote_blocks: list[Any]
    _family: Family

    def add_prompts(self, tuning_mode: str, num_tokens: int) -> None:
        """Add prompts, and train nothing else, except for a classifier's new head.

        Virtual tokens begin as tokens drawn from the vocabulary (Lester et al., "The power of scale for
        parameter-efficient prompt tuning", 2021), deep ones as zeros.

        Args:
            tuning_mode: "prompt" or "deep_prompt".

        Raises:
            ValueError: the mode or the number of tokens is not possible.
        """
        if tuning_mode not in TUNING_MODES:
            raise ValueError(f"tuning_mode {tuning_mode!r} is unknown: expected one of {', '.join(TUNING_MODES)}")
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(f"num_prompt_tokens is {num_tokens!r}: expected a number of at least 1")
        remote, embeddings = self._remote_blocks[0], cast(nn.Embedding, self.get_input_embeddings())
        vocabulary = embeddings.weight
        if tuning_mode == "deep_prompt" and remote.adapter_name:
            raise ValueError(
                f"the model uses adapter {remote.adapter_name!r} of the servers: deep prompts cannot be added"
            )
        drawn = vocabulary[torch.randint(len(vocabulary), (num_tokens,))].detach().float()
        deep = None
        if tuning_mode == "deep_prompt":
            deep = torch.zeros(self._family.num_blocks, num_tokens, self._family.hidden_size, device=drawn.device)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(NEW_HEADS))
        remote.add_prompts(Prompts(drawn, deep))

    @property
    def prompts(self) -> Prompts | None:
        prompts: Prompts | None = self._remote_blocks[0].prompts
        return prompts

    def load_prompts(self, directory: str | PathLike[str]) -> None:
        """Load values that ``save_pretrained`` has written, or PEFT for its prompt tuning.

        Raises:
            ValueError: the model has no prompts, or prompts of other shapes.
        """
        if self.prompts is None:
            raise ValueError(
                f"this model has no prompts, so it cannot take those in {directory}: call add_prompts first"
            )
        tensors = dict(_saved(self))
        path = Path(directory) / PROMPTS_FILE
        if path.exists():
            names = {name: name for name in tensors}
        else:
            path, names = Path(directory) / WEIGHTS_NAME, {"embedding": PEFT_KEY}
        stored = read_header(path)
        found = {name: stored[written] for name, written in names.items() if written in stored}
        shapes = {name: list(tensor.shape) for name, tensor in found.items()}
        expected = {name: list(tensors[name].shape) for name in names}
        if shapes != expected:
            raise ValueError(f"{path} has prompts of shapes {shapes}, expected {expected}")
        with torch.no_grad():
            for name, tensor in found.items():
                tensors[name].copy_(tensor.read())

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Run the stock method. For a model with prompts, write the prompts, and the adapter if the model has one.

        Shallow prompts are also written as PEFT's prompt tuning.
        """
        if self.prompts is None:
            return super().save_pretrained(save_directory, *args, **kwargs)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in _saved(self)}, Path(save_directory) / PROMPTS_FILE)
        if getattr(self, "_hf_peft_config_loaded", False):
            return super().save_pretrained(save_directory, *args, **kwargs)
        if self.prompts.deep is None and self.can_generate():
            _save_for_peft(self, self.prompts.embedding, Path(save_directory))
        return None


def _saved(model: PromptsMixin) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of the prompts and of a classifier's new head."""
    prompts = model.prompts
    if prompts is not None:
        yield from ((name, parameter.detach()) for name, parameter in prompts.named_parameters())
    for name, parameter in model.named_parameters():
        if name.startswith(NEW_HEADS) and parameter.requires_grad:
            yield name, parameter.detach()


def _save_for_peft(model: PromptsMixin, embedding: nn.Parameter, directory: Path) -> None:
    from peft import PromptTuningConfig, TaskType

    text = model.config.get_text_config(decoder=True)  # a model that sees keeps the numbers below in there
    PromptTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=model.name_or_path,
        inference_mode=True,
        num_virtual_tokens=len(embedding),
        token_dim=embedding.shape[1],
        num_transformer_submodules=1,
        num_attention_heads=text.num_attention_heads,
        num_layers=text.num_hidden_layers,
    ).save_pretrained(str(directory))
    save_file({PEFT_KEY: embedding.detach().contiguous()}, directory / WEIGHTS_NAME, {"format": "pt"})
