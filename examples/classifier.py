"""Tells Python code from prose with layers of one's own between and after remote blocks.

    python examples/classifier.py

Text goes through blocks 0:6 on servers, a small trainable module here, blocks 6:10 on servers, and a trainable head
here. Gradients flow back through the servers' blocks, which stay as they are; blocks 10:20 are never computed. The
texts are those that Python ships with: its documentation, and the source of its library. Without --swarm or
--initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import pydoc_data.topics
import random
import textwrap

import torch
from little_swarm import connected, flags
from torch import nn

SNIPPET, STEPS, BATCH, HELD_OUT = 80, 30, 16, 100  # characters, steps, snippets per step, snippets to test


class Adapter(nn.Module):
    """A bottleneck that begins as the identity (Houlsby et al., 2019)."""

    def __init__(self, size: int, bottleneck: int = 32) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(size, bottleneck), nn.Linear(bottleneck, size)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.up(torch.nn.functional.gelu(self.down(hidden)))


class Classifier(nn.Module):
    """Logits of two classes for each text."""

    def __init__(self, model) -> None:
        super().__init__()
        self.embed, self.blocks = [model.get_input_embeddings()], model.blocks  # in a list: not ours to train
        self.adapter = Adapter(model.config.hidden_size)
        self.head = nn.Linear(model.config.hidden_size, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed[0](input_ids).detach()
        hidden = self.blocks[0:6](hidden, attention_mask)
        hidden = self.adapter(hidden)
        hidden = self.blocks[6:10](hidden, attention_mask)
        mask = attention_mask[:, :, None]
        return self.head((hidden * mask).sum(1) / mask.sum(1))  # of the mean over the text's tokens


def snippets() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Pieces of prose (0) and code (1) to train on, and others to test with, half of each."""
    lines = "\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    prose = [" ".join(text.split()) for text in lines if text[:1].isupper() and text.count(" ") > 15]
    sources = [inspect.getsource(module) for module in (argparse, ast, inspect, random, textwrap)]
    functions = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    code = [" ".join(ast.unparse(statement).split()) for node in functions for statement in node.body[1:]]
    draw = random.Random(0)
    kinds = [[text[:SNIPPET] for text in texts if len(text) >= SNIPPET] for texts in (prose, code)]
    kinds = [draw.sample(texts, len(texts)) for texts in kinds]
    prose, code = ([(text, label) for text in texts] for label, texts in enumerate(kinds))
    half = HELD_OUT // 2
    return prose[half:] + code[half:], prose[:half] + code[:half]


def main() -> None:
    train, test = snippets()
    with connected(flags(__doc__).parse_args()) as (model, tokenizer):
        classifier = Classifier(model)

        def logits(texts: list[tuple[str, int]]) -> torch.Tensor:
            batch = tokenizer([text for text, _ in texts], return_tensors="pt", padding=True)
            return classifier(batch.input_ids, batch.attention_mask)

        def accuracy() -> float:
            with torch.no_grad():
                found = logits(test).argmax(1)
            return (found == torch.tensor([label for _, label in test])).float().mean().item()

        before = accuracy()
        optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3)
        print(f"\n{len(train)} snippets to train on, {len(test)} others to test with")
        for step in range(1, STEPS + 1):
            batch = random.Random(step).sample(train, BATCH)
            loss = nn.functional.cross_entropy(logits(batch), torch.tensor([label for _, label in batch]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 1 or step % 10 == 0:
                print(f"  step {step}: loss {loss.item():.3f}", flush=True)

        names = ("prose", "code")
        print("\nAfter training:")
        for (text, _), row in zip(test[:3] + test[-3:], logits(test[:3] + test[-3:]).softmax(1), strict=True):
            print(f"  {names[row.argmax()]:6}{row.max():4.0%}  {text[:60]} …")
        print(f"\nRight on held-out snippets: {before:.0%} before, {accuracy():.0%} after.")


if __name__ == "__main__":
    main()
