"""A language model is trained from scratch in stages, by processes of which none holds all of it; then they serve it.

    python examples/train_swarm.py

Five processes hold three stages of a small Llama, and a trainer takes text through them: the documentation that every
Python carries. After a third of the steps one of the five is killed (SIGKILL), and another one takes its place. After
the last step the same processes serve the model as a swarm, without a restart, and it writes text. What the model has
learned is shown by the bits that it needs for a byte of text that was kept from training, beside those of simpler
models. Every process computes with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from train_tiny_model import SHIPPED, Document, collect_documents, model_bits_per_byte, ngram_bits_per_byte
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from swarm_client import DistributedModel

NAME = "python-docs"
VICTIM = 2
RATE = 3e-3
PROMPTS = ("Return a list of", "class Error(Exception):", "The with statement")
LIMIT_S = 300.0  # for a process to start, or to say the next thing

RUN_FILE = """\
[run]
name = "{name}"
target_batch_size = {batch}
checkpoint_every = 20
checkpoints = ""
[model]
name_or_path = {model}
tokenizer = {tokenizer}
[data]
source = {data}
block_length = {window}
[optimizer]
name = "adamw"
lr = {rate}
weight_decay = 0.1
schedule = "cosine"
warmup_steps = {warmup}
total_steps = {steps}
[stages]
count = {stages}
micro_batch_size = {micro_batch}
activations = "bf16"
gradients = "bf16"
"""


@dataclass(frozen=True)
class Size:
    """``window``: tokens of a sample; ``micro_batch``, ``batch``: samples.

    ``peers``: the stage of each process; the first has a stage alone, and is the one by which others join.
    ``modules``: of the library, whose documentation is the text; None for all. ``held_out``: documents by which the
    model is measured. ``written``: tokens that it writes after each prompt.
    """

    blocks: int = 6
    window: int = 128
    micro_batch: int = 8
    batch: int = 16
    peers: tuple[int, ...] = (0, 1, 1, 2, 2)
    modules: int | None = None
    held_out: int = 24
    written: int = 60

    @property
    def step_tokens(self) -> int:
        return self.batch * self.window


QUICK = Size(2, window=32, micro_batch=2, batch=8, peers=(0, 1, 1), modules=100, held_out=4, written=16)


class Process:
    """``python -m swarm_training.stages ARGUMENTS``."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
        command = [sys.executable, "-m", "swarm_training.stages", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def lines(self) -> Iterator[str]:
        """What it prints, until it ends."""
        while line := self._lines.get(timeout=LIMIT_S):
            yield line

    def wait_for(self, what: str) -> str:
        """The rest of the next line that begins so."""
        for line in self.lines():
            if line.startswith(what):
                return line.removeprefix(what).strip()
        raise SystemExit("a process has ended")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait()


@contextmanager
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def write_run(folder: Path, training: list[Document], size: Size, steps: int) -> Path:
    """The run file, the text and the shape of the model, which has no weights yet."""
    data, shape, run = folder / "text.jsonl", folder / "shape", folder / "RUN.toml"
    data.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in training))
    shape_of(size).save_pretrained(shape)
    paths = {"model": shape, "tokenizer": SHIPPED, "data": data}
    run.write_text(
        RUN_FILE.format(
            **{name: json.dumps(str(path)) for name, path in paths.items()},
            name=NAME,
            batch=size.batch,
            window=size.window,
            micro_batch=size.micro_batch,
            rate=RATE,
            warmup=max(1, steps // 12),
            steps=steps,
            stages=max(size.peers) + 1,
        )
    )
    return run


def shape_of(size: Size) -> LlamaConfig:
    """That of the model that ships with Swarm, with fewer blocks."""
    return AutoConfig.from_pretrained(SHIPPED, num_hidden_layers=size.blocks, dtype="float32")


def steps_in(minutes: float, size: Size) -> int:
    """About so many are taken in that time: two cores compute micro-batches, each forward twice and backward once."""
    model = AutoModelForCausalLM.from_config(shape_of(size))
    ids = torch.randint(0, 1000, (size.micro_batch, size.window))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        times.append(time.perf_counter() - start)
    cores = max(1, min(len(size.peers), os.cpu_count() or 1))
    step_s = sorted(times)[2] * 4 / 3 * size.batch / size.micro_batch / cores + 0.25  # averaging, and what is sent
    return max(10, round(minutes * 60 / step_s))


def train(run: Path, served: Path, exported: Path, size: Size, steps: int, running: list[Process]) -> str:
    """Trains, and exports to a directory; the processes serve then. Returns an address of theirs."""

    def stage(number: int, *peers: str) -> Process:
        flags = ["--stage", str(number), "--then-serve", str(served), "--quant", "none"]
        running.append(Process("serve", str(run), *flags, *peers))
        return running[-1]

    address = stage(size.peers[0]).wait_for("others join by: --initial-peers").split()[0]
    peers = ["--initial-peers", address]
    members = [running[0], *(stage(number, *peers) for number in size.peers[1:])]
    for member in members[1:]:
        member.wait_for("others join by:")
    stages = ", ".join(map(str, size.peers))
    print(f"{len(members)} processes hold the stages {stages}; a trainer begins", flush=True)
    trainer = Process("trainer", str(run), *peers)
    running.append(trainer)
    begin_s, shown = time.monotonic(), max(1, steps // 12)
    for line in trainer.lines():
        if not line.startswith("step "):
            continue
        step = int(line.split()[1].rstrip(":"))
        if step % shown == 0 or step == steps:
            print(f"{time.monotonic() - begin_s:5.0f} s  {line}", flush=True)
        if step == max(1, steps // 3):
            members[VICTIM].kill()
            print(f"killed a process of stage {size.peers[VICTIM]}; its work of this step is done again", flush=True)
            members[VICTIM] = stage(size.peers[VICTIM], *peers)
    for member in members:
        member.wait_for("ready")
    print(f"the run has taken its {steps} steps, and the {len(members)} processes serve the model", flush=True)
    export = Process("export", str(run), str(exported), *peers)
    running.append(export)
    export.wait_for("wrote")
    print(f"exported to {exported}", flush=True)
    return address


def write_text(model: Path, address: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with DistributedModel.from_pretrained(str(model), [address], NAME) as remote:
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            written = remote.generate(ids, max_new_tokens=num_tokens, do_sample=True, temperature=0.7, top_k=40)
            print(f"\n--- {tokenizer.decode(written[0], skip_special_tokens=True)}")


def show_learning(model: Path, training: list[Document], held_out: list[Document]) -> None:
    """Bits per byte of documents that were kept from training."""
    seen, unseen = ("\n\n".join(document.text for document in each).encode() for each in (training, held_out))
    trained, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    own = model_bits_per_byte(trained, tokenizer, held_out)
    ngrams = ngram_bits_per_byte(seen, unseen, order=2)
    print(f"\nheld-out text: {own:.2f} bits per byte; sequences of three bytes need {ngrams:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="about so long it trains (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="so many steps instead")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, fewer processes and 12 steps, to see it work"
    )
    parser.add_argument("--output", type=Path, help="directory that gets the model, called so (default: none is kept)")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    torch.set_num_threads(1)
    size = QUICK if arguments.quick else Size()
    steps = arguments.steps or (12 if arguments.quick else steps_in(arguments.minutes, size))
    documents = collect_documents(size.modules)
    training = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out][: size.held_out]
    with tempfile.TemporaryDirectory(prefix="train-swarm-") as folder, processes() as running:
        exported = arguments.output or Path(folder) / "own" / NAME
        run = write_run(Path(folder), training, size, steps)
        print(f"{steps} steps of {size.step_tokens} tokens", flush=True)
        address = train(run, Path(folder) / "servers" / exported.name, exported, size, steps, running)
        write_text(exported, address, size.written)
        show_learning(exported, training, held_out)
    print(f"{time.monotonic() - begin_s:.0f} s in all")


if __name__ == "__main__":
    main()
