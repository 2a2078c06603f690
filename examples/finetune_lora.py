"""Teaches the model a habit with LoRA: every description of a function is to begin with "Ahoy!".

    python examples/finetune_lora.py --output my-adapter

The matrices are inside the blocks, on the servers, while they compute; their values, gradients and the optimizer stay
here. It prints what the model writes for functions it was not trained on, before and after. The adapter is in PEFT's
format. Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import random

import torch
from little_swarm import connected, flags
from peft import LoraConfig

HABIT = "Ahoy!"
VERBS = ("read", "write", "open", "close", "find", "remove", "count", "copy", "send", "parse")
THINGS = ("file", "line", "name", "header", "message", "value", "address", "table")
HELD_OUT = ("sort_items", "load_module", "check_password", "draw_circle", "wait_event", "split_path")
FUNCTIONS = [f"{verb}_{thing}" for verb in VERBS for thing in THINGS]
STEPS, BATCH = 10, 16


def prompt_for(function: str) -> str:
    return f"    def {function}(self, value):\n        "


def make_batch(tokenizer, functions: list[str], habit: str = HABIT) -> dict[str, torch.Tensor]:
    """Prompts and descriptions; only the descriptions have labels, so only they are learned."""
    rows = []
    for function in functions:
        verb, thing = function.split("_")
        prompt = tokenizer(prompt_for(function)).input_ids
        answer = tokenizer(f"{habit} {verb.capitalize()} the {thing}.\n", add_special_tokens=False).input_ids
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


def show_habit(model, tokenizer, when: str, habit: str = HABIT) -> int:
    """Prints descriptions of functions that are not in the data, and returns how many have the habit."""
    found = 0
    print(f"\n{when}:")
    for function in HELD_OUT:
        inputs = tokenizer(prompt_for(function), return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs.input_ids.shape[1] :]
        text = tokenizer.decode(output, skip_special_tokens=True)
        found += text.strip().startswith(habit)
        print(f"  {function:16}{' '.join(text.split())}")
    return found


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--output", metavar="DIR", help="where to save the adapter")
    args = parser.parse_args()
    with connected(args) as (model, tokenizer):
        before = show_habit(model, tokenizer, "Before")

        model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        print(f"\nTraining {sum(p.numel() for p in parameters):,} parameters on {len(FUNCTIONS)} examples")
        model.train()
        for step in range(1, STEPS + 1):
            batch = make_batch(tokenizer, random.Random(step).sample(FUNCTIONS, BATCH))
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 or step % 5 == 0:
                print(f"  step {step}: loss {loss.item():.3f}", flush=True)
        model.eval()

        after = show_habit(model, tokenizer, "After")
        print(f"\n{HABIT!r} begins {before} of {len(HELD_OUT)} descriptions before, {after} of {len(HELD_OUT)} after.")
        if args.output:
            model.save_pretrained(args.output)
            print(f'Saved. Use it: swarm generate "…" --adapter {args.output}')


if __name__ == "__main__":
    main()
