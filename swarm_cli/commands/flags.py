"""The flags that several commands share, and the values that these flags set."""

from __future__ import annotations

import argparse
import os
from typing import Any

from swarm_client.core.config import COMPRESSIONS, ClientConfig
from swarm_client.core.draft_names import check_draft_name
from swarm_client.generation.opening import ModelChoice, check_model_name
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, FROM_SWARM, with_gguf_file
from swarm_protocol.access.member_flags import ENVIRONMENT, add_member_flags
from swarm_protocol.process.invocation import add_common_flags
from swarm_protocol.process.local_registry import checked_name


def add_swarm_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags that name the swarm, and say how to join it."""
    command.add_argument(
        "--initial-peers", nargs="+", default=[], metavar="MULTIADDR", help="members of the swarm to join through"
    )
    command.add_argument("--discover", action="store_true", help="look for members on the local network besides")
    command.add_argument("--swarm", default=ClientConfig.swarm, metavar="NAME", help="the swarm's name")
    add_member_flags(command, "the key of the peer that the membership is for, if it came without one")
    add_common_flags(command)


def add_model_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for the model, its choice of tokens, and its servers."""
    add_remote_flags(command)
    add, options = command.add_argument, TextOptions
    add("--temperature", type=float, default=options.temperature, metavar="T", help="0: always the likeliest token")
    add(
        "--top-p",
        type=float,
        default=options.top_p,
        metavar="P",
        help="sample among the likeliest tokens of this total",
    )
    add("--top-k", type=int, default=options.top_k, metavar="K", help="sample among this many tokens")
    add("--seed", type=int, default=options.seed, help="makes sampling repeatable")
    add("--adapter", metavar="DIR|NAME", help="trained by finetune or PEFT; or the name of one that servers have")


def add_remote_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for the model and its servers."""
    add, client = command.add_argument, ClientConfig
    add(
        "--model",
        metavar="NAME_OR_PATH",
        help="name on the hub, directory, GGUF file, smollm2, or swarm://NAME to take the files from other members; if "
        f"not given, the only model of the swarm at --initial-peers, else {DEFAULT_MODEL}",
    )
    add("--revision", help="branch, tag or commit of a hub model")
    add("--gguf-file", metavar="NAME", help="of a model that has several GGUF files: the one to take")
    add("--head-quant", default=client.head_quant, metavar="none|int8", help="of the head that makes logits")
    add(
        "--draft",
        default=client.draft,
        metavar="auto|none|lookup|NAME_OR_PATH",
        help="what guesses the next tokens, which one pass verifies; a small model needs the same tokenizer",
    )
    add(
        "--wait",
        type=float,
        default=client.wait_timeout_s,
        metavar="SECONDS",
        help="for servers of all blocks, and for room",
    )
    add(
        "--recovery-timeout",
        type=float,
        default=client.recovery_timeout_s,
        metavar="SECONDS",
        help="for others to take the place of servers that fail",
    )
    add("--allow", nargs="+", default=[], metavar="PEER", help="use these servers only; the end of a peer id will do")
    add("--block", nargs="+", default=[], metavar="PEER", help="do not use these servers")
    add(
        "--compression",
        default=client.compression,
        metavar="|".join(COMPRESSIONS),
        help="of hidden states on the wire",
    )
    add("--standby", action="store_true", help="keep copies of keys and values on other servers")


def text_options(args: argparse.Namespace, **more: int) -> TextOptions:
    return TextOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        **more,
    )


def model_choice(args: argparse.Namespace) -> ModelChoice:
    """Return the chosen model; the flags are checked now."""
    return ModelChoice(named_model(args), remote_config(args), args.revision, args.adapter or "")


def named_model(args: argparse.Namespace) -> str:
    joins_others = (args.initial_peers or args.discover) and args.gguf_file is None
    return with_gguf_file(args.model or (FROM_SWARM if joins_others else DEFAULT_MODEL), args.gguf_file)


def remote_config(args: argparse.Namespace) -> ClientConfig:
    """Return the client's config from the flags for the model and its servers; the flags are checked now."""
    check_model_name(named_model(args), args.revision)
    check_draft_name(args.draft)
    config = ClientConfig(
        initial_peers=tuple(args.initial_peers),
        discover=args.discover,
        swarm=checked_name(args.swarm),
        wait_timeout_s=args.wait,
        recovery_timeout_s=args.recovery_timeout,
        standby=args.standby,
        head_quant=args.head_quant,
        compression=args.compression,
        draft=args.draft,
        allowed_servers=tuple(args.allow),
        blocked_servers=tuple(args.block),
        **member_fields(args),
    )
    check_access(config)
    return config


def swarm_config(args: argparse.Namespace) -> ClientConfig:
    """Return the client's config from the flags that name the swarm; the flags are checked now."""
    config = ClientConfig(
        initial_peers=tuple(args.initial_peers),
        discover=args.discover,
        swarm=checked_name(args.swarm),
        **member_fields(args),
    )
    check_access(config)
    return config


def member_fields(args: argparse.Namespace) -> dict[str, Any]:
    return {"swarm_key": args.swarm_key, "membership": args.membership, "identity": args.identity}


def check_access(config: ClientConfig) -> None:
    """Raise ValueError if the client cannot join as the member that its config names."""
    if config.swarm_key or config.membership or config.identity or os.environ.get(ENVIRONMENT):
        from swarm_client.core.access import ClientAccess

        ClientAccess.of(config)
