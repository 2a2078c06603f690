"""A client as a process of its own, which goes on from token to token when told: ``python -m tests.swarm.lone_client``.

Reads a line before it computes a token, and prints the token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class LoneClient:
    """The process, seen by the test."""

    def __init__(self, ids: torch.Tensor, *, cache: Path, prefix: Sequence[str] = (), **options: Any) -> None:
        """
        Args:
            prefix: a command that runs the process.
            options: of ``DistributedModel.from_pretrained``, and ``max_new_tokens``.
        """
        job = json.dumps({"ids": ids.tolist(), **options})
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.swarm.lone_client", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )
        self.tokens: list[int] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, number: int) -> list[int]:
        """All tokens so far, after so many more."""
        for _ in range(number):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, "the client has ended"
            self.tokens.append(int(line))
        return self.tokens

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> LoneClient:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()


class _Printer(BaseStreamer):
    def __init__(self) -> None:
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            print(int(value), flush=True)
            sys.stdin.readline()
        self._is_prompt = False

    def end(self) -> None:
        pass


def main() -> None:
    import tests.conftest  # noqa: F401  (one thread, no hub)
    from swarm_client import DistributedModel

    job = json.loads(sys.argv[1])
    ids, new_tokens = torch.tensor(job.pop("ids")), job.pop("max_new_tokens")
    with DistributedModel.from_pretrained(job.pop("model"), **job) as model:
        model.generation_config.eos_token_id = None
        sys.stdin.readline()
        model.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=_Printer())


if __name__ == "__main__":
    main()
