"""The builders of model, tokenizer, optimizer and data from a run file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from swarm_models.checkpoints.default_model import check_location, locate
from swarm_protocol.failures import first_line
from swarm_training.data.blocks import BlockBatches, TokenBlocks, Tokenize
from swarm_training.data.opening import DataReader, open_batches, open_blocks, open_held_out
from swarm_training.data.settings import DataSettings
from swarm_training.data.streaming import StreamBatches
from swarm_training.optim.by_name import decay_groups, optimizer_by_name
from swarm_training.optim.muon import hidden_matrices, split_hidden
from swarm_training.runfile.settings import PRESETS, EvaluationSettings, LocalSettings, ModelSettings, OptimizerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    name = settings.tokenizer or settings.name_or_path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(locate(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no tokenizer that can be read: {first_line(error)}") from None
    return tokenizer


def build_model(settings: ModelSettings, vocab_size: int, block_length: int) -> nn.Module:
    """Build a causal language model in fp32, the same for all peers. Raises ValueError if there is no such model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    if settings.preset:
        model: nn.Module = AutoModelForCausalLM.from_config(preset_config(settings.preset, vocab_size, block_length))
        return model.train()
    check_location(name := locate(settings.name_or_path))
    try:
        if settings.init == "pretrained":
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"{settings.name_or_path} is no causal language model: {first_line(error)}") from None
    return model.train()


def preset_config(preset: str, vocab_size: int, block_length: int) -> Any:
    """Return the configuration of a small Llama: ``preset`` is its size."""
    from transformers import LlamaConfig

    hidden, layers, heads = PRESETS[preset]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=block_length,
        tie_word_embeddings=True,
    )


def scheduled(
    optimizer: torch.optim.Optimizer, rate: Callable[[int], float], step: Callable[[], int]
) -> RemovableHandle:
    """Give each step of the optimizer the learning rate of the run's global step, until the handle is removed, or its
    context is left."""

    def set_rate(*_arguments: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(step())

    return optimizer.register_step_pre_hook(set_rate)


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = decay_groups(trained, settings.weight_decay, settings.decay_vectors)
    if settings.name == "muon":
        groups = split_hidden(groups, hidden_matrices(model))
    return optimizer_by_name(settings.name, groups, lr=settings.rate(0))


def build_outer_optimizer(settings: LocalSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, settings.outer_lr, settings.outer_momentum, nesterov=settings.nesterov)


def build_batches(
    data: DataSettings, reader: DataReader, tokenizer: PreTrainedTokenizerBase, batch_size: int, cache: Path
) -> BlockBatches | StreamBatches:
    """Open the batches. ``cache``: a directory for tokens of all data. Raises ValueError if there is no such data."""
    directory = cache / _fingerprint(data, reader.run, tokenizer)
    return open_batches(data, reader, _tokenize_with(tokenizer), tokenizer.eos_token_id, batch_size, directory)


def build_blocks(data: DataSettings, run: str, tokenizer: PreTrainedTokenizerBase, cache: Path) -> TokenBlocks:
    """Open all of the data; ``cache`` as for ``build_batches``. Raises ValueError if there is no such data."""
    directory = cache / _fingerprint(data, run, tokenizer)
    return open_blocks(data, run, _tokenize_with(tokenizer), tokenizer.eos_token_id, directory)


def build_held_out(settings: EvaluationSettings, block_length: int, tokenizer: PreTrainedTokenizerBase) -> TokenBlocks:
    """Read the held-out samples. Raises ValueError if there are no such data, or not one sample."""
    try:
        data = settings.data(block_length)
        return open_held_out(data, settings.samples, _tokenize_with(tokenizer), tokenizer.eos_token_id)
    except ValueError as error:
        raise ValueError(f"the held-out data of [evaluation]: {error}") from None


def _tokenize_with(tokenizer: PreTrainedTokenizerBase) -> Tokenize:
    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    return tokenize


def _fingerprint(data: DataSettings, run: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that differs if the data, the run or the tokenizer differ."""
    path = Path(data.source).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    # The run decides the order of files and shards, and all its peers must have the same table.
    facts: list[Any] = [run, data.source, data.column, data.split, data.config]
    for file in files:
        if file.is_file():
            facts.append([str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns])
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([facts, vocabulary, tokenizer.eos_token_id]).encode()).hexdigest()[:32]
