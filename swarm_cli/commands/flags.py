"""The parsers of commands, the flags that several commands share, and the values that these flags set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from swarm_client.core.config import COMPRESSIONS, ClientConfig
from swarm_client.core.draft_names import check_draft_name
from swarm_client.generation.opening import ModelChoice, check_model_name
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import add_gguf_flag, add_model_flag, check_source, named_model
from swarm_protocol.access.member_flags import ENVIRONMENT, MEMBERSHIP, SWARM_KEY
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.process.invocation import add_common_flags
from swarm_protocol.process.local_registry import checked_name

Command = Callable[[], None]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
WHICH_SWARM = (
    Flag("initial_peers", "members of the swarm to join through", metavar="MULTIADDR"),
    Flag("discover", "also look for members on the local network"),
    Flag("swarm", "name of the swarm", metavar="NAME", read=checked_name),
)
SWARM = ConfigFlags(
    ClientConfig,
    *WHICH_SWARM,
    MEMBERSHIP,
    SWARM_KEY,
    Flag("identity", "the key of the peer that the membership is for, if it came without one", metavar="FILE"),
)
_SERVERS = ConfigFlags(
    ClientConfig,
    Flag("head_quant", "quantisation of the head that makes logits", metavar="none|int8"),
    Flag(
        "draft",
        "source of guesses for the next tokens, which one pass verifies; a small model needs the same tokenizer",
        metavar="auto|none|lookup|NAME_OR_PATH",
    ),
    Flag("wait_timeout_s", "time to wait for servers of all blocks, and for room", name="wait", metavar="SECONDS"),
    Flag("recovery_timeout_s", "time for other servers to replace failed ones", metavar="SECONDS"),
    Flag("allowed_servers", "use only these servers: peer ids or their ends", name="allow", metavar="PEER"),
    Flag("blocked_servers", "do not use these servers", name="block", metavar="PEER"),
    Flag(
        "weights",
        "SHA-256 of the list of files to take from members, with --model swarm://NAME; by default what most offer",
        metavar="SHA256",
    ),
    Flag("compression", "codec of hidden states on the wire", metavar="|".join(COMPRESSIONS)),
    Flag("standby", "keep copies of keys and values on other servers"),
)
SAMPLING = ConfigFlags(
    TextOptions,
    Flag("temperature", "temperature of sampling; 0: always the likeliest token", metavar="T"),
    Flag("top_p", "sample among the likeliest tokens with this total probability", metavar="P"),
    Flag("top_k", "sample among so many of the likeliest tokens", metavar="K"),
    Flag("seed", "makes sampling repeatable"),
)


def add_swarm_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags that name the swarm, and say how to join it."""
    SWARM.add_to(command)
    add_common_flags(command)


def add_model_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for the swarm, the model, its choice of tokens, and its servers."""
    add_remote_flags(command)
    SAMPLING.add_to(command)
    command.add_argument(
        "--adapter", metavar="DIR|NAME", help="adapter from finetune or PEFT; or the name of one that servers have"
    )


def add_remote_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for the swarm, the model, and its servers."""
    add_swarm_flags(command)
    add_model_flag(command)
    command.add_argument("--revision", help="branch, tag or commit of a hub model")
    add_gguf_flag(command)
    _SERVERS.add_to(command)


def model_choice(args: argparse.Namespace) -> ModelChoice:
    """Return the chosen model; the flags are checked now."""
    return ModelChoice(named_model(args), remote_config(args), args.revision, args.adapter or "")


def remote_config(args: argparse.Namespace) -> ClientConfig:
    """Return the client's config from the flags for the model and its servers; the flags are checked now."""
    check_model_name(named_model(args), args.revision)
    check_source(args.weights, named_model(args))
    check_draft_name(args.draft)
    return swarm_config(args, **_SERVERS.values(args))


def swarm_config(args: argparse.Namespace, **others: Any) -> ClientConfig:
    """Return the client's config from the flags that name the swarm, with the values of other fields.

    The flags are checked now.
    """
    config = ClientConfig(**SWARM.values(args), **others)
    check_access(config)
    return config


def check_access(config: ClientConfig) -> None:
    """Raise ValueError if the client cannot join as the member that its config names."""
    if config.swarm_key or config.membership or config.identity or os.environ.get(ENVIRONMENT):
        from swarm_client.core.access import client_access

        client_access(config)
