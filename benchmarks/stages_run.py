"""Processes that train in stages, and the run that they train, for ``train_stages.py``."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaConfig

HERE = Path(__file__).parent
SCRIPT = str(HERE / "stages_process.py")
TOKENIZER = HERE.parent / "swarm_models" / "shipped" / "tiny-python-docs"
WAIT_S = 180.0
RUN = """
[run]
name = "benchmark"
target_batch_size = {batch}
checkpoint_every = {checkpoint_every}
checkpoints = ""
[model]
name_or_path = "{model}"
tokenizer = "{tokenizer}"
[data]
source = "{source}"
block_length = {length}
[optimizer]
name = "adamw"
lr = 1e-4
[stages]
count = 2
micro_batch_size = {rows}
"""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        micro_batches: of a step.
        steps: of a turn, after the first one.
        kills: so many, one every ``kill_s``.
    """

    hidden: int
    layers: int
    length: int
    rows: int
    micro_batches: int
    steps: int
    rounds: int
    kills: int
    kill_s: float = 20.0


@dataclass
class Process:
    """Says lines.

    Attributes:
        lines: what it has said, and when.
    """

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    @classmethod
    def start(cls, *arguments: str) -> Process:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started = cls(process)
        threading.Thread(target=started._read, daemon=True).start()
        return started

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for(self, found: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Raises RuntimeError if it does not come in time, or the process ends before."""
        until_s = time.monotonic() + timeout_s
        while not (value := found()):
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise RuntimeError(f"{self.process.args} said only {[line for _, line in self.lines[-3:]]}")
            time.sleep(0.05)
        return value

    @property
    def address(self) -> str | None:
        found = (re.search(r"--initial-peers (\S+)", line) for _, line in self.lines)
        return next((each[1] for each in found if each), None)

    @property
    def stage(self) -> int | None:
        """Where a peer is that has joined."""
        found = [re.match(r"stage (\d+) of ", line) for _, line in self.lines]
        return None if self.address is None else next((int(each[1]) for each in reversed(found) if each), None)

    @property
    def steps(self) -> list[float]:
        """When the run had taken each."""
        return [at_s for at_s, line in self.lines if re.match(r"step \d+:", line)]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def all_ended(processes: list[Process]) -> Iterator[list[Process]]:
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def write_run(scale: Scale, directory: Path, micro_batches: int, checkpoint_every: int = 20) -> Path:
    LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(TOKENIZER)),
        hidden_size=scale.hidden,
        intermediate_size=scale.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=scale.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=scale.length,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory / "model")
    source = directory / "text.txt"
    rng = random.Random(1)
    source.write_text("\n".join(f"The sum of {rng.random()} and {rng.random()} is a number." for _ in range(4_000)))
    file = directory / "RUN.toml"
    text = RUN.format(
        batch=micro_batches * scale.rows,
        model=directory / "model",
        tokenizer=TOKENIZER,
        source=source,
        length=scale.length,
        rows=scale.rows,
        checkpoint_every=checkpoint_every,
    )
    file.write_text(text)
    return file
