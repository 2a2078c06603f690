"""A client as a process of its own: generates greedily, one line for each token, and waits before some of them.

Arguments, as JSON: the model's directory, initial peers, the prompt's tokens, how many new ones, and a list of
[after how many tokens, the seconds to wait].
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers.generation.streamers import BaseStreamer

from swarm_client import DistributedModel


class Printer(BaseStreamer):
    def __init__(self, pauses: dict[int, float]) -> None:
        self._pauses, self._seen = pauses, -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self._seen += 1
        if self._seen:
            print(int(value), flush=True)
            time.sleep(self._pauses.get(self._seen, 0.0))

    def end(self) -> None:
        pass


def main() -> None:
    directory, peers, prompt, new_tokens, pauses = json.loads(sys.argv[1])
    model = DistributedModel.from_pretrained(directory, initial_peers=peers)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    model.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=Printer(dict(pauses)))
    model.close()


if __name__ == "__main__":
    main()
