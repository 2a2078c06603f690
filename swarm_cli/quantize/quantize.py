"""Rounding of a whole checkpoint to 4 bits, one block after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from swarm_cli.quantize.calibration import first_hidden_states, text_windows
from swarm_cli.quantize.rounding import RoundedBlock
from swarm_cli.quantize.written_checkpoint import WrittenCheckpoint
from swarm_client.generation.generation import load_tokenizer
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_training.checkpoints.whole_directory import whole_directory


def quantize_checkpoint(
    model: str, revision: str | None, directory: Path, text: Path | None = None, num_tokens: int = 4096
) -> None:
    """Write a model's checkpoint in 4 bits into a new directory, with its tokenizer. A failure leaves nothing.

    Args:
        text: a file; the tokens that are used are spread over it. None: the shipped text.
        num_tokens: how many tokens of the text are used, at most.

    Raises:
        CheckpointError: the checkpoint or its tokenizer cannot be read, or its numbers are not finite.
        UnsupportedModel: the model cannot be split, takes pictures, or has weights in 4 bits already.
        CannotWrite: the directory cannot be written.
        ValueError: the text cannot be read, or has too few tokens.
    """
    checkpoint = ModelCheckpoint.open(model, revision)
    tokenizer = load_tokenizer(model, revision)
    windows = text_windows(tokenizer, text, num_tokens)
    with whole_directory(directory) as unfinished:
        tokenizer.save_pretrained(unfinished)
        round_blocks(checkpoint, windows, unfinished, partial(print, flush=True))
    print(f"ready model={directory}")


@torch.no_grad()
def round_blocks(
    checkpoint: ModelCheckpoint, windows: torch.Tensor, directory: Path, say: Callable[[str], None]
) -> None:
    """Write the checkpoint with its blocks rounded into a directory that exists.

    Each block gets the hidden states that the rounded blocks before it compute, so that it makes up for a part of their
    error. Memory holds these hidden states and either the embeddings or one block, in float32. windows: [n, tokens],
    the token ids that calibrate the rounding.
    """
    if checkpoint.config is not checkpoint.whole_config:
        raise UnsupportedModel(f"{checkpoint.location} takes pictures: expected a model of text alone")
    family, start = checkpoint.family, time.monotonic()
    eight_bits = eight_bit_layers(family)
    hidden = first_hidden_states(checkpoint, windows)
    written = WrittenCheckpoint(checkpoint, directory)
    written.add_stored(checkpoint.client_tensors())
    for index in family.all_blocks:
        stored = checkpoint.stored(lambda name, index=index: checkpoint.block_index(name) == index)  # type: ignore[misc]
        stack = load_blocks(checkpoint, Span(index, index + 1))
        block = RoundedBlock(stack, stored, eight_bits[index])
        hidden = block.round(hidden)
        written.add_block(stored, block.rounded)
        say(f"block {index + 1} of {family.num_blocks} rounded after {time.monotonic() - start:.0f} s")
    written.finish()
