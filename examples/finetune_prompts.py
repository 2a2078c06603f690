"""Teaches the model a habit with virtual tokens: 8 before the text, and 8 others before every block.

    python examples/finetune_prompts.py --output my-prompts

Every description of a function is to begin with "Deprecated:". Deep prompts travel with each request, and their
gradients come back; with "prompt" instead of "deep_prompt" there are only those before the text, which learn more
slowly. Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import random

import torch
from finetune_lora import BATCH, FUNCTIONS, HELD_OUT, make_batch, show_habit
from little_swarm import connected, flags

HABIT = "Deprecated:"
STEPS = 20


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--output", metavar="DIR", help="where to save the prompts")
    args = parser.parse_args()
    with connected(args) as (model, tokenizer):
        before = show_habit(model, tokenizer, "Before", HABIT)

        model.add_prompts("deep_prompt", 8)  # or from_pretrained(…, tuning_mode="deep_prompt", num_prompt_tokens=8)
        parameters = list(model.prompts.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=3e-2)
        print(f"\nTraining {sum(p.numel() for p in parameters):,} parameters on {len(FUNCTIONS)} examples")
        model.train()
        for step in range(1, STEPS + 1):
            batch = make_batch(tokenizer, random.Random(step).sample(FUNCTIONS, BATCH), HABIT)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 or step % 5 == 0:
                print(f"  step {step}: loss {loss.item():.3f}", flush=True)
        model.eval()

        after = show_habit(model, tokenizer, "After", HABIT)
        print(f"\n{HABIT!r} begins {before} of {len(HELD_OUT)} descriptions before, {after} of {len(HELD_OUT)} after.")
        if args.output:
            model.save_pretrained(args.output)
            print(f'Saved. Use it: swarm generate "…" --adapter {args.output}')


if __name__ == "__main__":
    main()
