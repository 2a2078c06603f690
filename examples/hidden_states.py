"""A loss of one's own on hidden states: texts about the same thing are to be near each other.

    python examples/hidden_states.py

Topics of Python's documentation are cut in two. From the hidden states after block 10, mean over tokens, the first half
of a topic is to find its second half among all others (a contrastive loss, van den Oord et al., 2018). What learns is
LoRA inside the remote blocks: no layer is put on top. Without --swarm or --initial-peers it starts two servers on this
machine first.
"""

from __future__ import annotations

import pydoc_data.topics
import random

import torch
from little_swarm import connected, flags
from peft import LoraConfig

CHARACTERS, STEPS, BATCH, HELD_OUT = 160, 30, 16, 24
TEMPERATURE = 0.05


def halves() -> list[tuple[str, str]]:
    """Two pieces of each topic, from its beginning and its middle, in a random order of topics."""
    texts = [" ".join(text.split()) for _, text in sorted(pydoc_data.topics.topics.items())]
    pairs = [(text[:CHARACTERS], text[len(text) // 2 :][:CHARACTERS]) for text in texts if len(text) > 3 * CHARACTERS]
    return random.Random(0).sample(pairs, len(pairs))


def main() -> None:
    pairs = halves()
    test, train = pairs[:HELD_OUT], pairs[HELD_OUT:]
    with connected(flags(__doc__).parse_args()) as (model, tokenizer):

        def vectors(texts: list[str]) -> torch.Tensor:
            """One of length 1 for each text."""
            batch = tokenizer(texts, return_tensors="pt", padding=True)
            hidden = model.blocks[0:10](model.get_input_embeddings()(batch.input_ids), batch.attention_mask)
            mask = batch.attention_mask[:, :, None]
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

        def similarities(pairs: list[tuple[str, str]]) -> torch.Tensor:
            """Of every first half (rows) and every second half (columns)."""
            both = vectors([first for first, _ in pairs] + [second for _, second in pairs])
            return both[: len(pairs)] @ both[len(pairs) :].T

        def found() -> int:
            with torch.no_grad():
                return int((similarities(test).argmax(1) == torch.arange(len(test))).sum())

        before = found()
        targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
        model.add_adapter(LoraConfig(r=8, target_modules=targets, layers_to_transform=list(range(10))))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        print(f"\n{len(train)} topics to train on, {len(test)} others to test with")
        for step in range(1, STEPS + 1):
            batch = random.Random(step).sample(train, BATCH)
            loss = torch.nn.functional.cross_entropy(similarities(batch) / TEMPERATURE, torch.arange(BATCH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 1 or step % 10 == 0:
                print(f"  step {step}: loss {loss.item():.3f}", flush=True)
        print(f"\nOf {len(test)} unseen topics, {before} found their other half before, {found()} after.")


if __name__ == "__main__":
    main()
