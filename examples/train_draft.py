"""Distils a draft from a model, for speculative decoding: a few blocks between the model's own embedding and head.

    python examples/train_draft.py tiny-python-docs --local --minutes 5 --out my-draft.safetensors
    python examples/train_draft.py my-org/my-model --swarm my-swarm --text docs/*.txt --out my-draft.safetensors
    swarm generate "Return a list of" --draft my-draft.safetensors

The model writes text, or is given some, and says what it would have written at each position; the draft learns to say
the same. With --local the whole model is loaded into this process, and a draft of its shape begins with copies of its
first blocks. Otherwise a swarm computes the blocks, in this phase only: what the model said is kept in memory (and in
the file --data, if given), and the training itself is done here, with the client's embedding and head.

While it trains, it prints how often the draft guesses the model's own next token, on text kept from training.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from train_tiny_model import Muon, learning_rate
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.generation.generation import load_tokenizer
from swarm_client.speculation.distilled.file import save_draft
from swarm_client.speculation.distilled.network import DraftNetwork, DraftShape
from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_protocol.checkpoints.default_model import DEFAULT_MODEL, check_location, locate
from swarm_protocol.errors import SwarmError

LENGTH = 256  # tokens of a row
PROMPT = 48  # of them in a row that the model continues
ROWS = 8  # of a step
TOGETHER = 32  # rows that the model continues at a time
HELD_OUT_SHARE = 0.04
GUESSES = 4  # of which acceptance is measured
UNROLL_FROM = 0.5  # of the run: then the draft learns from its own output too
STEP_WEIGHT = 0.7  # of each next guess in the loss: it counts only if those before were right


@dataclass
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


def collected(model: PreTrainedModel, args: argparse.Namespace) -> list[Rows]:
    """Texts (given, or written by the model at random), and the model's likeliest continuations of parts of them."""
    if args.data is not None and args.data.exists():
        return [Rows(*tensors) for tensors in torch.load(args.data)]
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


# --- the draft ----------------------------------------------------------------------------------------------------


def new_network(model: PreTrainedModel, args: argparse.Namespace) -> DraftNetwork:
    """Random, or with the first blocks of the model if they are here and have the draft's shape."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config = model.config.get_text_config()
    width = min(config.hidden_size, args.width)
    heads = config.num_attention_heads if width == config.hidden_size else max(1, width // 64)
    shape = DraftShape(
        vocab_size=head.shape[0],
        model_hidden_size=head.shape[1],
        hidden_size=width,
        intermediate_size=config.intermediate_size if width == config.hidden_size else width * 11 // 4,
        num_blocks=args.blocks,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", heads) if width == config.hidden_size else heads,
        context=LENGTH,
    )
    network = DraftNetwork(shape)
    with torch.no_grad():
        network.token_norm.weight.fill_(embedding.float().pow(2).mean().sqrt())
        network.body.norm.weight.fill_(0.1)
        nn.init.normal_(network.join.weight, std=shape.hidden_size**-0.5)
    for name, parameter in network.body.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_blocks))
    if args.local and width == shape.model_hidden_size and model.config.model_type == "llama":
        copy_blocks(model, network)
    return network


@torch.no_grad()
def copy_blocks(model: PreTrainedModel, network: DraftNetwork) -> None:
    """Begins as an early exit of the model that knows no features yet."""
    width = network.shape.hidden_size
    for own, block in zip(network.body.layers, model.model.layers, strict=False):
        own.load_state_dict(block.state_dict())
    network.body.norm.load_state_dict(model.model.norm.state_dict())
    network.join.weight.copy_(torch.eye(width, 2 * width))


def unrolled(network: DraftNetwork, embedded: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """What the draft computes at each position as the first, second, … guess after what is confirmed.

    At the step ``j`` (from 0) position ``t`` sees what step 0 computed up to ``t - j``, where features are the model's,
    and of each step ``i`` between the position ``t - j + i``: its own guesses (EAGLE-3, Li et al., 2025, section 3.2).
    What step ``j`` says of the first ``j`` positions means nothing.
    """
    length, cache, outputs = embedded.shape[1], DynamicCache(), []
    at = torch.arange(length)
    back = at[:, None] - at[None, :]
    for step in range(steps):
        seen = [back >= step, *(back == step - i for i in range(1, step + 1))]
        if step:
            seen[-1] = back == 0
        mask = torch.cat(seen, 1)[None, None]
        outputs.append(network(embedded, features, cache, mask, at[None]))
        features = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
    return outputs


def inputs(rows: Rows, prompt: int) -> torch.Tensor:
    """The features that a client has: from the prompt on, each as that of the token after it."""
    features = F.pad(rows.features[:, :-1].float(), (0, 0, 1, 0))
    features[:, :prompt] = 0
    return features


class Distillation:
    def __init__(self, model: PreTrainedModel, network: DraftNetwork) -> None:
        self.network = network
        self.embedding = model.get_input_embeddings().weight.detach().float()
        self.head = model.get_output_embeddings().weight.detach().float()
        matrices = [p for p in network.parameters() if p.ndim == 2]
        vectors = [p for p in network.parameters() if p.ndim < 2]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=0, weight_decay=0.1),
            torch.optim.AdamW(vectors, lr=0, weight_decay=0, betas=(0.9, 0.95)),
        ]

    def loss(self, rows: Rows, steps: int) -> torch.Tensor:
        """Cross-entropy with the model's probabilities, from a prompt of random length on."""
        prompt = int(torch.randint(LENGTH // 16, LENGTH * 3 // 8, ()))
        features = inputs(rows, prompt)
        features[torch.rand(len(features)) < 0.06] = 0  # a session that has just moved here knows none
        with torch.autocast("cpu", torch.bfloat16):
            outputs = unrolled(self.network, F.embedding(rows.ids, self.embedding), features, steps)
            with torch.no_grad():
                target = F.linear(rows.features[:, prompt:].float(), self.head).float().softmax(-1)
            total = torch.zeros(())
            for step, output in enumerate(outputs):
                logits = F.linear(output[:, prompt + step :], self.head).float()
                total = total + STEP_WEIGHT**step * F.cross_entropy(logits.mT, target[:, step:].mT)
        return total / sum(STEP_WEIGHT**step for step in range(steps))

    def step(self, rows: Rows, steps: int, lr: float) -> float:
        loss = self.loss(rows, steps)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    @torch.inference_mode()
    def accepted(self, rows: Rows, prompt: int = LENGTH // 4) -> tuple[float, float]:
        """How often the first guess is the model's likeliest token, and how many of GUESSES are right in a row."""
        right = []
        for some in (rows[start : start + ROWS] for start in range(0, min(len(rows.ids), 4 * ROWS), ROWS)):
            outputs = unrolled(self.network, F.embedding(some.ids, self.embedding), inputs(some, prompt), GUESSES)
            best = F.linear(some.features.float(), self.head).argmax(-1)
            hits = [F.linear(output, self.head).argmax(-1) == best for output in outputs]
            last = LENGTH - GUESSES
            right.append(torch.stack([hits[i][:, prompt + i : last + i] for i in range(GUESSES)], -1))
        hits = torch.cat(right).float()  # [rows, positions, guesses]
        return hits[..., 0].mean().item(), hits.cumprod(-1).sum(-1).mean().item()


def train(distillation: Distillation, data: list[Rows], args: argparse.Namespace) -> float:
    """Until the steps or the minutes are used up, whichever is first; returns the acceptance on held-out text."""
    train_rows, held_out = zip(*(rows.split() for rows in data), strict=True)
    orders: list[list[int]] = [[] for _ in data]
    begin_s, shown_s, step, recent = time.monotonic(), -math.inf, 0, 0.0
    while True:
        progress = max(step / args.steps, (time.monotonic() - begin_s) / 60 / args.minutes)
        if time.monotonic() - shown_s > args.every_s or progress >= 1:
            shown_s = time.monotonic()
            of_texts, of_own = (distillation.accepted(rows) for rows in held_out)
            print(
                f"step {step} ({min(progress, 1):.0%}): loss {recent:.3f}, accepted {of_own[0]:.3f} of the model's own "
                f"text ({of_own[1]:.2f} of {GUESSES} in a row), {of_texts[0]:.3f} of other text",
                flush=True,
            )
        if progress >= 1:
            return of_own[0]
        kind = step % len(data)
        if len(orders[kind]) < ROWS:
            orders[kind] += torch.randperm(len(train_rows[kind].ids)).tolist()
        picked, orders[kind] = orders[kind][:ROWS], orders[kind][ROWS:]
        steps = args.unroll if progress > UNROLL_FROM else 1
        loss = distillation.step(train_rows[kind][torch.tensor(picked)], steps, learning_rate(args.peak_lr, progress))
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {step}: lower --peak-lr, which is {args.peak_lr}")
        step += 1
        recent = loss if step == 1 else 0.97 * recent + 0.03 * loss


# --- the command --------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as swarm generate takes it (%(default)s)")
    parser.add_argument("--local", action="store_true", help="load the whole model here, and ask no swarm")
    parser.add_argument("--swarm", metavar="NAME", help="a swarm that serves the model")
    parser.add_argument("--initial-peers", nargs="+", default=[], metavar="MULTIADDR", help="its members")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="text to learn on")
    parser.add_argument("--tokens", type=int, default=200_000, help="of text, and of continuations (%(default)s)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="where texts are kept for a second run")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then; the schedule follows the clock")
    parser.add_argument("--out", type=Path, default=Path("draft.safetensors"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=2, help="of the draft (%(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the draft, or the model's if smaller (%(default)s)")
    parser.add_argument("--unroll", type=int, default=2, help="guesses in a row to learn, in the end (%(default)s)")
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--every-s", type=float, default=60, help="seconds between two reports (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and --steps give the same draft")
    args = parser.parse_args()
    for name, least in (("tokens", 1), ("steps", 1), ("minutes", 1e-3), ("blocks", 1), ("width", 64), ("unroll", 1)):
        if not getattr(args, name) >= least:
            parser.error(f"--{name} is {getattr(args, name)}: expected at least {least}")
    for path in args.text:
        if not path.is_file():
            parser.error(f"--text {path} does not exist: expected a file of text in UTF-8")
    if not args.out.resolve().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    return args


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    try:
        check_location(locate(args.model))
        name = Checkpoint.open(locate(args.model)).name
        with loaded(args) as model:
            data = collected(model, args)
            network = new_network(model, args)
            distillation = Distillation(model, network)
        size = sum(parameter.numel() for parameter in network.parameters())
        print(f"a draft of {network.shape.num_blocks} blocks and {size:,} parameters", flush=True)
        acceptance = train(distillation, data, args)
        save_draft(network, name, acceptance, args.out)
    except (SwarmError, ValueError, OSError) as error:
        sys.exit(f"train_draft.py: {error}")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB, a draft for {name}")


if __name__ == "__main__":
    main()
