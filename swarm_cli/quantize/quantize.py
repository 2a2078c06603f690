"""Rounding of a whole checkpoint to 4 bits, one block after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from swarm_cli.quantize.calibration import first_hidden_states, text_windows
from swarm_cli.quantize.rounding import RoundedBlock
from swarm_cli.quantize.written_checkpoint import WrittenCheckpoint
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.gguf.tokenizer import read_tokenizer
from swarm_models.quantization.eight_bits import eight_bit_layers
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks


def quantize_checkpoint(
    model: str, revision: str | None, directory: Path, text: Path | None = None, num_tokens: int = 4096
) -> None:
    """Write a model's checkpoint in 4 bits into a new directory, with its tokenizer.

    ``text``: the file of the text whose first tokens are used; None: the shipped one.

    Raises:
        CheckpointError: the checkpoint or its tokenizer cannot be read.
        UnsupportedModel: the model cannot be split, or takes pictures.
        ValueError: the text has too few tokens.
        OSError: the text cannot be read, or the directory cannot be written.
    """
    tokenizer = read_tokenizer(model, revision)
    checkpoint = ModelCheckpoint.open(model, revision)
    round_blocks(checkpoint, text_windows(tokenizer, text, num_tokens), directory, print)
    tokenizer.save_pretrained(directory)
    print(f"ready model={directory}")


@torch.no_grad()
def round_blocks(
    checkpoint: ModelCheckpoint, windows: torch.Tensor, directory: Path, say: Callable[[str], None]
) -> None:
    """Write the checkpoint with its blocks rounded. windows: [n, tokens], the token ids that calibrate it.

    Each block gets the hidden states that the rounded blocks before it compute. Memory holds one block in float32.
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
