"""What `train_draft.py` learns from: texts, and what the model says of them, computed here or by a swarm."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.generation.generation import load_tokenizer
from swarm_models.checkpoints.default_model import locate

LENGTH = 256  # tokens of a row
PROMPT = 48  # of them in a row that the model continues
ROWS = 8  # that are computed together, here and in a step of the training
TOGETHER = 32  # rows that the model continues at a time
HELD_OUT_SHARE = 0.04


@dataclasses.dataclass
class Rows:
    """Texts and what the model thought of them.

    Attributes:
        ids: [rows, LENGTH]
        features: the model's last hidden states, what its head reads, [rows, LENGTH, hidden] in half precision.
    """

    ids: torch.Tensor
    features: torch.Tensor

    def split(self) -> tuple[Rows, Rows]:
        """What is trained on, and what is held out: the last rows, which are of other places of the text."""
        held_out = max(1, round(len(self.ids) * HELD_OUT_SHARE))
        return self[:-held_out], self[-held_out:]

    def __getitem__(self, which: slice | torch.Tensor) -> Rows:
        return Rows(self.ids[which], self.features[which])


# --- the model, here or in a swarm --------------------------------------------------------------------------------


@contextlib.contextmanager
def loaded(args: argparse.Namespace) -> Iterator[PreTrainedModel]:
    """The model that is distilled; its blocks are here, or on servers."""
    if args.local:
        yield AutoModelForCausalLM.from_pretrained(locate(args.model), dtype=torch.float32).eval()
        return
    with DistributedModel.from_pretrained(args.model, args.initial_peers, args.swarm) as model:
        yield model


@torch.inference_mode()
def features_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, hidden]"""
    parts = [model.base_model(input_ids=rows, use_cache=False).last_hidden_state.half() for rows in ids.split(ROWS)]
    return torch.cat(parts)


@torch.inference_mode()
def continued(model: PreTrainedModel, prompts: torch.Tensor, *, sample: bool) -> torch.Tensor:
    """Rows of LENGTH tokens that begin with ``prompts``; the likeliest tokens, or as likely as they are."""
    new = LENGTH - prompts.shape[1]
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    rows = []
    for some in prompts.split(TOGETHER):
        mask = torch.ones_like(some)
        rows.append(model.generate(some, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, **how))
        print(f"  the model has written {sum(map(len, rows)) * new:,} of {len(prompts) * new:,} tokens", flush=True)
    return torch.cat(rows)


def first_token(model: PreTrainedModel) -> int:
    """What the model begins a text with."""
    config = model.generation_config
    token = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    token = token[0] if isinstance(token, list) else token
    return 0 if token is None else token


def given_text(args: argparse.Namespace, begin: int) -> torch.Tensor:
    """Windows of the files, each behind the token that begins a text, as many as ``--tokens`` allows."""
    tokenizer = load_tokenizer(args.model)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.text)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    count = len(ids) // (LENGTH - 1)
    if count < 4:
        raise ValueError(f"--text has {len(ids)} tokens: expected at least {4 * LENGTH}")
    windows = F.pad(ids[: count * (LENGTH - 1)].view(count, -1), (1, 0), value=begin)
    return windows[: max(4, args.tokens // LENGTH)]


def kept_rows(path: Path, hidden_size: int) -> list[Rows]:
    """What an earlier run has put into ``--data``."""
    try:
        kept = [Rows(*tensors) for tensors in torch.load(path, weights_only=True)]
        assert all(rows.features.shape == (*rows.ids.shape, hidden_size) for rows in kept)
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, AttributeError, AssertionError):
        raise ValueError(
            f"--data {path} is no file of an earlier run for this model: delete it, or name another"
        ) from None
    return kept


def collected(model: PreTrainedModel, args: argparse.Namespace) -> list[Rows]:
    """Texts (given, or written by the model at random), and the model's likeliest continuations of parts of them."""
    if args.data is not None and args.data.exists():
        return kept_rows(args.data, model.get_output_embeddings().weight.shape[1])
    begin, count = first_token(model), max(4, args.tokens // LENGTH)
    texts = given_text(args, begin) if args.text else continued(model, torch.full((count, 1), begin), sample=True)
    sources = torch.linspace(0, len(texts) - 1, count).round().long()  # in order: held-out prompts are of held-out text
    starts = torch.randint(LENGTH - PROMPT, (count,)).tolist()
    parts = [texts[row, start + 1 : start + PROMPT] for row, start in zip(sources.tolist(), starts, strict=True)]
    likeliest = continued(model, F.pad(torch.stack(parts), (1, 0), value=begin), sample=False)
    print("what the model makes of it is computed …", flush=True)
    kept = [Rows(ids, features_of(model, ids)) for ids in (texts, likeliest)]
    if args.data is not None:
        torch.save([(rows.ids, rows.features) for rows in kept], args.data)
    return kept
