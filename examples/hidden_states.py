"""A loss of one's own on hidden states: a text full of typos is to be near the text without them.

    python examples/hidden_states.py

Sentences of Python's documentation get other letters in places. From the hidden states after block 10, mean over
tokens, each is to find its original among all others, as in a search that forgives (a contrastive loss, van den Oord et
al., 2018). What learns is LoRA inside the remote blocks; no layer is put on top, and blocks 10:20 are never computed.
Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from string import ascii_lowercase

import torch
from little_swarm import connected, flags
from peft import LoraConfig

CHARACTERS, TYPOS, STEPS, BATCH, HELD_OUT = 80, 0.2, 20, 12, 50
TEMPERATURE = 0.05


def sentences() -> list[str]:
    """Beginnings of paragraphs, in a random order."""
    paragraphs = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).split("\n\n")
    texts = [" ".join(paragraph.split())[:CHARACTERS] for paragraph in paragraphs if paragraph[:1].isupper()]
    texts = sorted({text for text in texts if len(text) == CHARACTERS})
    return random.Random(0).sample(texts, len(texts))


def with_typos(text: str, draw: random.Random) -> str:
    return "".join(draw.choice(ascii_lowercase) if draw.random() < TYPOS else letter for letter in text)


def main() -> None:
    texts = sentences()
    test, train = texts[:HELD_OUT], texts[HELD_OUT:]
    with connected(flags(__doc__).parse_args()) as (model, tokenizer):

        def vectors(texts: list[str]) -> torch.Tensor:
            """One of length 1 for each text."""
            batch = tokenizer(texts, return_tensors="pt", padding=True)
            hidden = model.blocks[0:10](model.get_input_embeddings()(batch.input_ids), batch.attention_mask)
            mask = batch.attention_mask[:, :, None]
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

        def similarities(texts: list[str], seed: int) -> torch.Tensor:
            """Of every text with typos (rows) and every original (columns)."""
            draw = random.Random(seed)
            both = vectors([with_typos(text, draw) for text in texts] + texts)
            return both[: len(texts)] @ both[len(texts) :].T

        def found() -> int:
            with torch.no_grad():
                return int((similarities(test, seed=0).argmax(1) == torch.arange(len(test))).sum())

        before = found()
        targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
        model.add_adapter(LoraConfig(r=8, target_modules=targets, layers_to_transform=list(range(10))))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        print(f"\n{len(train)} sentences to train on, {len(test)} others to test with, such as:")
        print(f"  {test[0]}\n  {with_typos(test[0], random.Random(0))}\n")
        for step in range(1, STEPS + 1):
            batch = random.Random(step).sample(train, BATCH)
            loss = torch.nn.functional.cross_entropy(similarities(batch, step) / TEMPERATURE, torch.arange(BATCH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 1 or step % 10 == 0:
                print(f"  step {step}: loss {loss.item():.3f}", flush=True)
        print(f"\nOf {len(test)} unseen sentences with typos, {before} found their original before, {found()} after.")


if __name__ == "__main__":
    main()
