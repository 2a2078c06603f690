"""Two clients train one LoRA adapter together, each on data that the other does not have.

    python examples/lora_together.py --output my-adapter

The habit is that of finetune_lora.py: every description of a function is to begin with "Ahoy!". Each client has the
functions of half of the verbs. No client has the model: gradients come through the blocks on the servers; the clients
average them, and hold the same adapter after every step. Without --swarm or --initial-peers it starts two servers and
the second client on this machine. Elsewhere, the first client prints what the others give to --join.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time

import torch
from finetune_lora import FUNCTIONS, HABIT, HELD_OUT, VERBS, make_batch, show_habit
from little_swarm import connected, flags, swarm_of
from peft import LoraConfig

from swarm_training import TrainingRun

STEPS, BATCH = 15, 8
TARGET_TOKENS = 160  # of all clients together, for one step


def functions_of(part: int) -> list[str]:
    verbs = VERBS[part::2]
    return [function for function in FUNCTIONS if function.split("_")[0] in verbs]


def train(model, tokenizer, run: TrainingRun, part: int) -> None:
    functions, rng = functions_of(part), random.Random(part)
    while run.num_steps < STEPS:
        batch = make_batch(tokenizer, rng.sample(functions, BATCH))
        loss = model(**batch).loss
        loss.backward()
        step = run.num_steps
        run.step(samples=int((batch["labels"][:, 1:] != -100).sum()))  # the loss is a mean over these tokens
        if run.num_steps > step and run.num_steps % 5 == 0:
            print(f"  step {run.num_steps}, {len(run.last_group)} clients: loss {loss.item():.3f} here", flush=True)


def start_second_client(swarm: str, run: TrainingRun) -> subprocess.Popen[str]:
    """Returns when it has joined the run."""
    command = [sys.executable, __file__, "--swarm", swarm, "--part", "1", "--join", *run.initial_peers]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while run.num_peers < 2:
        if second.poll() is not None:
            sys.exit("The second client has ended before it joined.")
        time.sleep(0.1)
    return second


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--join", nargs="+", default=[], metavar="MULTIADDR", help="clients that train the adapter")
    parser.add_argument("--part", type=int, choices=(0, 1), default=0, help="which half of the data is here")
    parser.add_argument("--output", metavar="DIR", help="where to save the adapter")
    args = parser.parse_args()
    is_alone = not (args.swarm or args.initial_peers or args.join)
    with connected(args) as (model, tokenizer):
        before = show_habit(model, tokenizer, "Before")

        model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        with TrainingRun(
            "ahoy", parameters, optimizer, target_batch_size=TARGET_TOKENS, initial_peers=args.join
        ) as run:
            second = None
            if is_alone:
                print("\nStarting the second client …", flush=True)
                second = start_second_client(swarm_of(args), run)
            elif not args.join:
                print("\nOthers take part with --part 1 --join", *run.initial_peers)
            count = sum(parameter.numel() for parameter in parameters)
            print(f"\nTraining {count:,} parameters on {len(functions_of(args.part))} examples")
            model.train()
            train(model, tokenizer, run, args.part)
            model.eval()
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()
            print(f"\nAdapter {digest}", flush=True)
            if second is not None:
                is_same = f"Adapter {digest}" in second.communicate()[0].splitlines()
                print(f"Both clients have {'the same adapter, bit for bit' if is_same else 'different adapters'}.")

        after = show_habit(model, tokenizer, "After")
        print(f"\n{HABIT!r} begins {before} of {len(HELD_OUT)} descriptions before, {after} of {len(HELD_OUT)} after.")
        if args.output:
            model.save_pretrained(args.output)
            print(f'Saved. Use it: swarm generate "…" --adapter {args.output}')


if __name__ == "__main__":
    main()
