"""The text that calibrates the rounding, and the hidden states that the first block gets for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import swarm_models
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.hollow_model import load_tensors, named_like

SHIPPED = Path(swarm_models.__file__).parent / "shipped" / "calibration" / "text.txt"
WINDOW = 256  # tokens that are computed together


def text_windows(tokenizer: PreTrainedTokenizerBase, text: Path | None, num_tokens: int) -> torch.Tensor:
    """Return the token ids of windows that are spread over the text, [n, ``WINDOW``] with ``num_tokens`` at most.

    Raises ValueError if the text is shorter than a window, or cannot be read.
    """
    ids = tokenizer(_content(text or SHIPPED), return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < WINDOW:
        raise ValueError(f"{text or SHIPPED} has {len(ids)} tokens: expected at least {WINDOW}")
    count = max(1, min(num_tokens, len(ids)) // WINDOW)
    starts = torch.linspace(0, len(ids) - WINDOW, count).long()
    return torch.stack([ids[start : start + WINDOW] for start in starts])


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not in UTF-8: expected a file of text in this encoding") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def first_hidden_states(checkpoint: ModelCheckpoint, ids: torch.Tensor) -> torch.Tensor:
    """Return what the model gives its first block: [n, tokens, hidden_size] float32. ids: [n, tokens].

    Raises CheckpointError if the embeddings are missing.
    """
    family = checkpoint.family

    class Front(family.base_class):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            setattr(family.owner_of(self), family.blocks, torch.nn.ModuleList([_FirstBlock()]))

    front = named_like(family.base_class, Front)
    # ``client_tensors`` are all tensors outside the blocks, so that a block without parameters leaves none over.
    model, info = load_tensors(front, checkpoint.config, checkpoint.client_tensors(), torch.float32)
    checkpoint.require_fit(info)
    try:
        model(ids, use_cache=False)
    except _Reached as reached:
        return reached.hidden
    raise AssertionError("the model has computed without its blocks")


class _Reached(Exception):
    """A signal that the first block was called, which ends the computation: later blocks are not there."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _FirstBlock(torch.nn.Module):
    """A block that only takes its input."""

    def __getattr__(self, name: str) -> Any:
        """Return None for what a family asks its blocks, such as the kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None

    def forward(self, hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise _Reached(hidden)
