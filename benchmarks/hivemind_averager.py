"""One peer of hivemind's averager, for ``train_together.py``: the same vectors, orders and events as our volunteers."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression

CODECS = {"fp32": NoCompression, "fp16": Float16Compression}
TIMEOUT_S = 60.0


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **facts}), flush=True)


def main(task: dict[str, Any]) -> None:
    """``task``: number, peers, size, codec, group_size."""
    torch.set_num_threads(1)
    number = task["number"]
    own = torch.randn(task["size"], generator=torch.Generator().manual_seed(number)) + number
    dht = hivemind.DHT(task.get("peers", []), host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DecentralizedAverager(
        [torch.zeros(task["size"])],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=task["group_size"],
        compression=CODECS[task["codec"]](),
    )
    say("joined", peers=[str(address) for address in dht.get_visible_maddrs()])
    for line in sys.stdin:
        if json.loads(line)["do"] == "leave":
            break
        with averager.get_tensors() as (vector,):
            vector.copy_(own)
        arrived_s = time.monotonic()
        averager.step(timeout=TIMEOUT_S)
        got_s = time.monotonic()
        with averager.get_tensors() as (vector,):
            say("averaged", arrived_s=arrived_s, got_s=got_s, mean=float(vector.mean()))
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
