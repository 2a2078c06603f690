"""What the examples share: flags that name a swarm, and two servers on this machine if none is named."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from swarm_cli.demo.local_cluster import LocalCluster
from swarm_client import DistributedModel
from swarm_client.generation.generation import load_tokenizer
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import SwarmError

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it
disable_progress_bar()


def flags(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swarm", metavar="NAME", help="a swarm that serves the shipped model")
    parser.add_argument("--initial-peers", nargs="+", default=[], metavar="MULTIADDR", help="its members")
    return parser


def swarm_of(args: argparse.Namespace) -> str | None:
    """The name of the swarm that is meant, or of the one that is started."""
    return args.swarm or (None if args.initial_peers else f"example-{os.getpid()}")


@contextmanager
def connected(
    args: argparse.Namespace, name: str = DEFAULT_MODEL, spans: Sequence[str] = ("0:10", "10:20"), **options: Any
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """Yield the model ``name``, whose blocks are on servers with these ``spans``, and its tokenizer.

    ``options``: further options of the client.
    """
    torch.manual_seed(0)
    swarm = swarm_of(args)
    with (
        _servers(swarm, () if args.swarm or args.initial_peers else spans, name),
        DistributedModel.from_pretrained(name, args.initial_peers, swarm, **options) as model,
    ):
        yield model, load_tokenizer(name)


@contextmanager
def _servers(swarm: str | None, spans: Sequence[str], name: str) -> Iterator[None]:
    if not spans:
        yield
        return
    print(f"Starting two servers, for blocks {' and '.join(spans)} …", flush=True)
    with LocalCluster() as cluster:
        started = [cluster.start("--blocks", blocks, "--swarm", swarm, "--model", name) for blocks in spans]
        try:
            cluster.wait_ready(started)
        except SwarmError as error:
            raise SystemExit(f"error: {error}") from None
        yield
