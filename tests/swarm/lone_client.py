"""A client as a process of its own: generates greedily and prints one line for each token.

Arguments, as JSON: the model's directory, options of the client, the prompt's tokens, how many new ones, and after how
many of them the client waits for a line on stdin (0: after none).
"""

from __future__ import annotations

import json
import sys

import torch
from transformers.generation.streamers import BaseStreamer

from swarm_client import DistributedModel


class Printer(BaseStreamer):
    def __init__(self, waits_after: int) -> None:
        self._waits_after, self._seen = waits_after, -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self._seen += 1
        if self._seen:
            print(int(value), flush=True)
            if self._seen == self._waits_after:
                sys.stdin.readline()

    def end(self) -> None:
        pass


def main() -> None:
    directory, options, prompt, new_tokens, waits_after = json.loads(sys.argv[1])
    model = DistributedModel.from_pretrained(directory, **options)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    model.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=Printer(waits_after))
    model.close()


if __name__ == "__main__":
    main()
