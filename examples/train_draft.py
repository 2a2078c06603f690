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
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from draft_texts import LENGTH, ROWS, Rows, collected, loaded
from torch import nn
from torch.nn import functional as F
from train_tiny_model import Muon, learning_rate
from transformers import DynamicCache, PreTrainedModel

from swarm_client.drafts.distilled.file import save_draft
from swarm_client.drafts.distilled.network import DraftNetwork, DraftShape
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, check_location, locate
from swarm_protocol.errors import SwarmError

GUESSES = 4  # of which acceptance is measured
UNROLL_FROM = 0.5  # of the run: then the draft learns from its own output too
STEP_WEIGHT = 0.7  # of each next guess in the loss: it counts only if those before were right


# --- the draft ----------------------------------------------------------------------------------------------------


def new_network(model: PreTrainedModel, args: argparse.Namespace) -> DraftNetwork:
    """Random, or with the first blocks of the model if they are here and those of a Llama."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.shape[1] != head.shape[1]:
        raise ValueError(f"the model embeds in {embedding.shape[1]} dimensions, but its head reads {head.shape[1]}")
    vocab_size, hidden_size = head.shape
    width = min(hidden_size, args.width) // 2 * 2
    heads = max(count for count in range(1, max(width // 32, 1) + 1) if width % (2 * count) == 0)
    network = DraftNetwork(
        DraftShape(vocab_size, hidden_size, width, width * 11 // 4, args.blocks, heads, heads, context=LENGTH)
    )
    with torch.no_grad():
        network.token_norm.weight.fill_(embedding.float().pow(2).mean().sqrt())
        network.body.norm.weight.fill_(0.1)
        nn.init.normal_(network.join.weight, std=width**-0.5)
    for name, parameter in network.body.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.blocks))
    return (args.local and with_first_blocks(model, network, args)) or network


@torch.no_grad()
def with_first_blocks(model: PreTrainedModel, like: DraftNetwork, args: argparse.Namespace) -> DraftNetwork | None:
    """An early exit of the model, which knows no features yet; None if its blocks do not fit."""
    config, width = model.config, like.shape.model_hidden_size
    if config.model_type != "llama" or width != like.shape.hidden_size or config.num_hidden_layers < args.blocks:
        return None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    network = DraftNetwork(
        dataclasses.replace(
            like.shape, intermediate_size=config.intermediate_size, num_heads=heads, num_kv_heads=kv_heads
        )
    )
    for own, block in zip(network.body.layers, model.model.layers, strict=False):
        theirs = block.state_dict()
        if {name: value.shape for name, value in own.state_dict().items()} != {n: v.shape for n, v in theirs.items()}:
            return None
        own.load_state_dict(theirs)
    network.token_norm.load_state_dict(like.token_norm.state_dict())
    network.body.norm.load_state_dict(model.model.norm.state_dict())
    network.join.weight.copy_(torch.eye(width, 2 * width))
    return network


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
        self.embedding = model.get_input_embeddings().requires_grad_(False)
        self.head = model.get_output_embeddings().requires_grad_(False)
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
            outputs = unrolled(self.network, self.embedding(rows.ids), features, steps)
            with torch.no_grad():
                target = self.head(rows.features[:, prompt:].float()).float().softmax(-1)
            total = torch.zeros(())
            for step, output in enumerate(outputs):
                logits = self.head(output[:, prompt + step :]).float()
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
            outputs = unrolled(self.network, self.embedding(some.ids), inputs(some, prompt), GUESSES)
            best = self.head(some.features.float()).argmax(-1)
            hits = [self.head(output).argmax(-1) == best for output in outputs]
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
            so_far = f"step {step} ({min(progress, 1):.0%}), loss {recent:.3f}" if step else "before training"
            print(
                f"{so_far}: {of_own[0]:.3f} of guesses are right in what the model writes "
                f"({of_own[1]:.2f} of {GUESSES} in a row), {of_texts[0]:.3f} in other text",
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


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    args = parser.parse_args(arguments)
    for name, least in (("tokens", 1), ("steps", 1), ("minutes", 1e-3), ("blocks", 1), ("width", 64), ("unroll", 1)):
        if not getattr(args, name) >= least:
            parser.error(f"--{name} is {getattr(args, name)}: expected at least {least}")
    for path in args.text:
        if not path.is_file():
            parser.error(f"--text {path} does not exist: expected a file of text in UTF-8")
    if args.local and (args.swarm or args.initial_peers):
        parser.error("--local asks no swarm: leave out --swarm and --initial-peers, or --local")
    if not args.out.resolve().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    try:
        check_location(locate(args.model))
        name = ModelCheckpoint.open(locate(args.model)).name
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
