"""What the benchmarks share: servers to measure, random prompts, and how fast sessions are."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import numpy
import torch
from local_servers import LocalServer, local_servers
from make_model import SHAPES
from network_lab import NoLab, require_lab
from rich.table import Table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from swarm_client import DistributedModel
from swarm_protocol.failures import undone_on_error

NO_TOKEN = 2**31 - 1  # in no vocabulary
QUANT_NAMES = {"none": "fp32", "int8": "int8"}
_TIMES_AND_ADDRESSES = r"^\d\d:\d\d:\d\d | at 0x[0-9a-f]+"
_NO_COMPLAINT = r"\s|$|Traceback|During handling|loading blocks"  # stacks and progress bars
_numbers = itertools.count()
_generator = torch.Generator().manual_seed(1)


@dataclass(frozen=True)
class Fleet:
    """Servers of one private swarm, each on one core."""

    path: Path
    swarm: str
    servers: list[LocalServer]

    @contextmanager
    def client(self, head_quant: str = "none", device: str = "cpu") -> Iterator[PreTrainedModel]:
        options = {} if head_quant == "none" else {"head_quant": head_quant}
        options |= {} if device == "cpu" else {"device": device, "dtype": torch.bfloat16}
        with DistributedModel.from_pretrained(str(self.path), swarm=self.swarm, **options) as model:
            yield model

    @property
    def peak_memory_bytes(self) -> int:
        """Of the server that has used the most so far."""
        return max(server.peak_memory_bytes for server in self.servers)

    def complaints(self) -> Counter[str]:
        """What the servers have logged so far, without times and stacks; they only say what went wrong."""
        lines = [line for server in self.servers for line in _log(server).splitlines()]
        return Counter(re.sub(_TIMES_AND_ADDRESSES, "", line) for line in lines if not re.match(_NO_COMPLAINT, line))

    @property
    def start_s(self) -> float:
        """Of the server that took longest to be ready."""
        return max(server.start_s for server in self.servers)


def _log(server: LocalServer) -> str:
    """Its stderr, a file; empty if the process is gone."""
    try:
        return Path(f"/proc/{server.pid}/fd/2").read_text()
    except OSError:
        return ""


@contextmanager
def fleet(path: Path, num_servers: int, quant: str, *arguments: str) -> Iterator[Fleet]:
    """Servers that share the blocks evenly; unless a GPU computes, they take turns over the cores there are.

    A group's members choose their cores themselves.
    """
    swarm = f"benchmark-{os.getpid()}-{next(_numbers)}"
    cores = sorted(os.sched_getaffinity(0))
    on_cpu = "--device" not in arguments or arguments[arguments.index("--device") + 1] == "cpu"
    is_pinned = on_cpu and "--group-size" not in arguments
    pins = [cores[number % len(cores)] for number in range(num_servers)] if is_pinned else None
    spans = even_spans(SHAPES[path.name]["num_hidden_layers"], num_servers)
    options = ["--model", str(path), "--quant", quant, "--log-level", "warning", *arguments]
    with local_servers(swarm, spans, options, pins) as running:
        yield Fleet(path, swarm, running)


def even_spans(num_blocks: int, num_servers: int) -> list[str]:
    cuts = [round(number * num_blocks / num_servers) for number in range(num_servers + 1)]
    return [f"{start}:{end}" for start, end in itertools.pairwise(cuts)]


def load_local(path: Path, device: str = "cpu", quant: str = "none") -> PreTrainedModel:
    """The whole model in this process: on the CPU float32, one thread; on CUDA bfloat16, or bitsandbytes' int8."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if device == "cpu":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    getLogger("bitsandbytes.autograd._functions").setLevel(ERROR)  # it warns at every product that is not in float16
    options = {} if quant == "none" else {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map={"": device}, **options).eval()


def random_ids(num_tokens: int, generator: torch.Generator = _generator) -> torch.Tensor:
    """[1, num_tokens], never the same twice: no server may have computed them before."""
    return torch.randint(3, 32000, (1, num_tokens), generator=generator)


def generate(model: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """Greedy, exactly ``new_tokens`` more: no token ends it, as one might that a random model takes by chance."""
    input_ids = input_ids.to(model.device)
    endless = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=NO_TOKEN)
    mask = torch.ones_like(input_ids)
    return model.generate(input_ids, attention_mask=mask, generation_config=endless, **options)


def first_token_s(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> float:
    start = time.perf_counter()
    generate(model, input_ids, 1, **options)
    return time.perf_counter() - start


def decode_tokens_per_s(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], new_tokens: int, **options: Any
) -> float:
    """Of all sessions together, one per prompt and all at once; per row, if prompts have several.

    They wait for one another after their first tokens; what counts is the time from there until the first of them ends.
    """
    together = threading.Barrier(len(prompts))
    streams = [_TokenTimes(together) for _ in prompts]

    def session(prompt: torch.Tensor, stream: _TokenTimes) -> None:
        with undone_on_error(together.abort):
            generate(model, prompt, new_tokens + 1, streamer=stream, **options)

    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(session, prompt, stream) for prompt, stream in zip(prompts, streams, strict=True)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    start, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    return sum(stream.tokens_at(end) - stream.tokens_at(start) for stream in streams) / (end - start)


class _TokenTimes(BaseStreamer):
    """Remembers when the new tokens came; after the first it waits for the other sessions."""

    def __init__(self, together: threading.Barrier) -> None:
        self._together = together
        self._is_prompt = True
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        if not self.times:
            self._together.wait()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def tokens_at(self, moment: float) -> float:
        """Tokens so far, with the part of the one that is on its way."""
        return float(numpy.interp(moment, self.times, range(len(self.times))))


def take_turns(rounds: int, contestants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """A B A B: what each measured in each round."""
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            measured[name].append(measure())
    return measured


def median_ratio(values: Sequence[float], beside: Sequence[float]) -> float:
    """To the rounds of the reference just before and after each."""
    return statistics.median(
        value / statistics.mean(beside[number : number + 2]) for number, value in enumerate(values)
    )


def json_row(
    name: str,
    measured: float,
    target: float | None = None,
    *,
    beside: float | None = None,
    ratio: float | None = None,
    at_most: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """One of the ``rows`` that every benchmark writes; the ratio is judged if there is one, else what was measured."""
    value = measured if ratio is None else ratio
    met = None if target is None else "yes" if (value <= target if at_most else value >= target) else "no"
    row = {"name": name, "measured": measured, "beside": beside, "ratio": ratio, "target": target, "met": met}
    return row | more


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of ``json_row`` results."""
    table = Table("", "measured", "beside", "ratio", "target", "met")
    for row in rows:
        numbers = (row[column] for column in ("measured", "beside", "ratio", "target"))
        table.add_row(row["name"], *("" if number is None else f"{number:.3g}" for number in numbers), row["met"] or "")
    return table


def has_lab(json_file: Path | None, settings: Mapping[str, Any]) -> bool:
    """Return whether this machine can have a lab of network namespaces; print and write why, if not."""
    try:
        require_lab()
    except NoLab as error:
        print(f"nothing can be measured here: {error}")
        if json_file is not None:
            write_json(json_file, settings, rows=[], skipped=str(error))
        return False
    return True


def write_json(file: Path, settings: Mapping[str, Any], **results: Any) -> None:
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    given = {name: str(value) for name, value in settings.items()}
    file.write_text(json.dumps({"settings": given, **machine, **results}, indent=2))
