"""Command line of the server: ``swarm server --blocks 10:20``.

Errors in the command line itself are reported before torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from swarm_models.checkpoints.default_model import (
    FROM_SWARM,
    add_gguf_flag,
    add_model_flag,
    check_location,
    locate,
    named_model,
)
from swarm_protocol.access.member_flags import CONFIG_RULES, ENVIRONMENT, MEMBERSHIP, SWARM_KEY
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.errors import SwarmError
from swarm_protocol.process import signals
from swarm_protocol.process.config_file import ConfigRules, Parsers, apply_config
from swarm_protocol.process.invocation import add_common_flags, add_version, typed, typed_flags
from swarm_protocol.process.local_registry import checked_name
from swarm_protocol.process.logs import say_error, start_logging
from swarm_protocol.process.scratch import remove_scratch
from swarm_protocol.size import parse_size
from swarm_protocol.span import Span
from swarm_protocol.system import spin_little
from swarm_server.core.config import ServerConfig
from swarm_server.group.group_key import read_group_key
from swarm_server.running import follow, run

Command = Callable[[], None]
Train = Callable[[argparse.Namespace], Command]  # returns the command for `--train`; raises ValueError
# The flags of each other mode. The first flag of a list selects the mode, see ``_require_only``.
_TRAIN_FLAGS = [
    *("train", "then-serve", "quant", "blocks", "initial-blocks", "memory", "device", "host", "port", "dht-port"),
    *("report", "announce-address", "initial-peers", "identity", "membership", "log-level", "log-format", "config"),
]
_FOLLOW_FLAGS = [
    *("follow", "group-key", "model", "gguf-file", "revision", "quant", "dtype", "weight-cache", "no-weight-cache"),
    *("log-level", "log-format", "config"),
]
_CONFIG_RULES = ConfigRules(
    CONFIG_RULES.environment, (("blocks", "initial-blocks", "num-blocks", "memory"), ("cache-tokens", "cache-memory"))
)


def _throughput(text: str) -> float | None:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise ValueError(f"throughput {text!r} is not understood: expected auto or a number") from None


_BlocksFlag = partial(Flag, metavar="START:END", read=Span.parse)
_SizeFlag = partial(Flag, metavar="SIZE", read=parse_size)
_FILES = ConfigFlags(
    ServerConfig,
    Flag(
        "share_weights",
        "whether members without a copy get the model's files, or at most how many bytes per second, such as 10MB. "
        "auto: yes, but outside a private swarm only models that anybody can download",
        metavar="auto|always|never|RATE",
    ),
    Flag(
        "weights",
        "SHA-256 of the list of files to take from members, as their logs show it; with --model swarm://NAME; by "
        "default the list that most members offer",
        metavar="SHA256",
    ),
    Flag("model_revision", "branch, tag or commit of a hub model", name="revision"),
)
_HOSTING = ConfigFlags(
    ServerConfig,
    _BlocksFlag("blocks", "blocks to host permanently; by default the server chooses"),
    _BlocksFlag("initial_blocks", "blocks to host at first; the server moves if others need it more"),
    Flag("num_blocks", "number of blocks to host, where the swarm needs them most", metavar="N"),
    _SizeFlag(
        "memory_bytes",
        "memory for blocks, keys and values, such as 4GiB, which decides how many blocks; with --train: memory of the "
        "process",
        name="memory",
    ),
    Flag("quant", "int8, int4 (on CPU), fp8 (on new GPUs), nf4, none, or bnb-int8 (slow on CPU, for comparison)"),
    Flag("dtype", "dtype of computation: auto, float32, bfloat16 or float16"),
    Flag("device", "auto, cpu, cuda, cuda:1, xpu or mps"),
    Flag(
        "devices",
        "several devices of one type, such as cuda:0,cuda:1: the blocks are split over them by free memory",
        metavar="DEVICE,…",
        default="",
        read=lambda text: tuple(text.split(",")) if text else (),
    ),
    Flag(
        "tensor_parallel",
        "with --devices: each device holds some of the rows of all blocks, and all compute at the same time; in int8, "
        "or with --quant none",
    ),
    Flag(
        "group_size",
        "how many processes compute each block together, each with some of its rows; on CPU, in int8 or int4. They are "
        "all on this machine, unless --group-listen is given",
        metavar="N",
    ),
    Flag(
        "group",
        "name of a group of near machines that compute each block together: those with the same name and key find each "
        "other in the swarm, one leads, and the others follow",
        metavar="NAME",
        read=partial(checked_name, what="group"),
    ),
    Flag(
        "group_listen",
        "with --group-size: an address of this machine to which followers on other machines come; by default --group "
        "takes a free port",
        metavar="HOST:PORT",
    ),
    Flag(
        "group_key",
        "with --group, --group-listen or --follow: file with the group's secret; the first member makes it, and the "
        "others need copies",
        metavar="FILE",
    ),
    Flag("group_always", "with --group or --group-listen: form the group even if it is computed to be slower"),
    Flag(
        "follow",
        "be a follower in the group of the leader that listens at this address, instead of a server",
        metavar="HOST:PORT",
    ),
    Flag(
        "host",
        "address to listen on; by default the one with a route to the swarm, and for a new swarm the loopback: only "
        "this machine can join",
        metavar="ADDRESS",
    ),
    Flag("port", "gRPC port; 0 takes a free one"),
    Flag("dht_port", "libp2p port; 0 takes a free one"),
    Flag("announce_address", "address at which others reach this server, if not --host", metavar="HOST[:PORT]"),
    Flag(
        "relay",
        "let others reach this server through members that relay; auto does so if they cannot reach it directly, for "
        "example behind a home router",
        metavar="auto|always|never",
    ),
    _SizeFlag(
        "relay_bytes_per_s",
        "bytes per second that this server relays for others that cannot be reached; 0: none",
        name="relay-for-others",
        default=f"{ServerConfig.relay_bytes_per_s // 10**6}MB",
    ),
    Flag(
        "relay_keepalive_s",
        "time between keep-alive messages to relays, so that routers keep the connection open",
        metavar="SECONDS",
    ),
    Flag("initial_peers", "members of the swarm to join", metavar="MULTIADDR"),
    Flag("discover", "also look for members on the local network, and let others find this server there"),
    Flag("swarm", "name of the swarm to join or start on this machine", metavar="NAME", read=checked_name),
    MEMBERSHIP,
    SWARM_KEY,
    Flag("identity", "key file; keeps the peer id over restarts", metavar="FILE"),
    Flag("open_to_clients", "in a private swarm: only members may be servers, but anybody may be a client"),
    Flag("cache_tokens", "KV-cache room over all sessions; default from free memory", metavar="N"),
    Flag(
        "kv_quant",
        "none, or int8: keys and values take 0.27 of float32 or 0.53 of bfloat16; decoding is slower",
    ),
    _SizeFlag("cache_bytes", "the same as memory, such as 2GiB or 500MB", name="cache-memory"),
    _SizeFlag(
        "kv_offload_memory_bytes",
        "CPU memory for keys and values of idle sessions and of prefixes for which the KV cache has no room; of use to "
        "GPUs",
        name="kv-offload-memory",
        default="0",
    ),
    _SizeFlag(
        "kv_offload_disk_bytes",
        "disk space for the same, once that memory is full",
        name="kv-offload-disk",
        default="0",
    ),
    Flag(
        "kv_offload_directory",
        "directory on the disk for --kv-offload-disk; by default the user's cache directory",
        metavar="DIR",
        name="kv-offload-dir",
    ),
    Flag(
        "prefix_cache",
        "share keys and values of equal prefixes of prompts between all clients, or among those of each client; auto "
        "is all in a private swarm and on one machine, and own among strangers",
        metavar="auto|all|own|none",
        off=("none", "the same as --prefix-cache none"),
    ),
    _SizeFlag(
        "weight_cache_bytes",
        "disk space for packed weights in the user's cache directory, which later starts read instead of packing again",
        name="weight-cache",
        default=f"{ServerConfig.weight_cache_bytes >> 30}GiB",
        off=("0", "neither read nor write packed weights; the same as --weight-cache 0"),
    ),
    Flag("adapters", "LoRA adapters of PEFT's format to offer", metavar="PATH"),
    _SizeFlag(
        "adapter_bytes",
        "memory for adapters that clients send",
        name="adapter-memory",
        default=f"{ServerConfig.adapter_bytes >> 20}MiB",
    ),
    _SizeFlag(
        "incoming_bytes",
        "memory for all requests that are arriving; more are refused",
        name="incoming-memory",
        default=f"{ServerConfig.incoming_bytes >> 20}MiB",
    ),
    Flag("chunk_tokens", "positions of a prompt computed at a time; default by device", metavar="N"),
    Flag("max_sessions", "most generations at a time", metavar="N"),
    Flag(
        "drain_timeout_s",
        "time for generations to end or move when the server drains; a second signal exits at once",
        metavar="SECONDS",
    ),
    Flag(
        "balance_margin",
        "relative gain of the swarm's throughput that is worth a move to other blocks; 0.03 is 3 %%",
        metavar="SHARE",
    ),
    Flag("throughput", "tokens/s to announce; auto measures", metavar="auto|N", default="auto", read=_throughput),
    Flag("metrics_port", "port of the metrics for Prometheus; 0: any free port", metavar="N"),
    Flag("metrics_host", "address at which the metrics are served", metavar="ADDRESS"),
    Flag("no_live_line", "on a terminal, do not show the status line below the log lines"),
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("server"),
        description="Host transformer blocks of a Hugging Face model for a swarm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_flag(parser)
    _FILES.add_to(parser)
    add_gguf_flag(parser)
    parser.add_argument(
        "--train",
        type=Path,
        metavar="RUN.toml",
        help="hold a stage of this run, and train it with others, instead of serving a model",
    )
    parser.add_argument(
        "--then-serve",
        type=Path,
        metavar="DIR",
        help="with --train: after the run's last step, write the model to this directory and serve the stage's blocks",
    )
    parser.add_argument(
        "--report",
        action="append",
        default=[],
        metavar="KIND:WHERE",
        help="with --train: where the numbers of each step go, as for `swarm train join`; may be given several times",
    )
    _HOSTING.add_to(parser)
    add_common_flags(parser, "info")
    add_version(parser)
    return parser


def parse_args(argv: list[str] | None = None, all_parsers: Callable[[], Parsers] | None = None) -> argparse.Namespace:
    """Parse the arguments; for ``all_parsers``, see ``apply_config``. Raise ValueError if the config file is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    apply_config({("server",): parser}, argv, _CONFIG_RULES, all_parsers)
    return parser.parse_args(argv)


def read_config(args: argparse.Namespace) -> ServerConfig:
    """Return the configuration of these arguments. Raise ValueError if one is out of range."""
    for peer in args.initial_peers:
        check_peer(peer)
    hosting = _HOSTING.values(args)
    if args.group is not None:  # without --group-size, a group with a name is a pair
        hosting["group_size"] = max(2, args.group_size)
    return ServerConfig(model=named_model(args), **_FILES.values(args), **hosting)


def require_train_flags(argv: list[str]) -> None:
    """Raise ValueError if a flag was given that does not apply to a stage of a run."""
    typed_here = typed_flags(make_parser(), argv)
    if "quant" in typed_here and "then-serve" not in typed_here:
        raise ValueError("--quant with --train is for what is served afterwards: expected --then-serve DIR with it")
    _require_only(typed_here, _TRAIN_FLAGS)


def require_follow_flags(argv: list[str]) -> None:
    """Raise ValueError if a flag was given that does not apply to a follower of a group."""
    _require_only(typed_flags(make_parser(), argv), _FOLLOW_FLAGS)


def _require_only(typed_here: set[str], allowed: Sequence[str]) -> None:
    """Raise ValueError if a flag was given that is not ``allowed`` together with the first allowed one."""
    first, *others = (f"--{flag}" for flag in allowed)
    if wrong := sorted(f"--{flag}" for flag in typed_here.difference(allowed)):
        raise ValueError(
            f"{' and '.join(wrong)}: cannot be combined with {first}, which takes only {', '.join(others)}"
        )


def require_members(args: argparse.Namespace, argv: list[str]) -> None:
    """Raise ValueError if a named group was asked for with fewer than two members."""
    if args.group is not None and args.group_size < 2 and "group-size" in typed_flags(make_parser(), argv):
        raise ValueError(f"--group-size {args.group_size} is no size of a group with a name: expected at least 2")


def check_files(config: ServerConfig) -> None:
    """Raise ValueError if a file is not where the arguments say."""
    if not config.model.startswith(FROM_SWARM):
        check_location(locate(config.model), config.model_revision)
    if config.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
        raise ValueError("--metrics-port needs one more package: pip install 'swarm-lm[metrics]'")
    if config.identity is not None and not config.identity.parent.is_dir():
        raise ValueError(f"identity {config.identity} cannot be made: {config.identity.parent} is no directory")
    for path in config.adapters:
        if not path.is_dir():
            raise ValueError(f"adapter {path} is no directory: expected one in PEFT's format")
    _check_keys(config)


def _check_keys(config: ServerConfig) -> None:
    """Raise ValueError if this server cannot be a member of its private swarm, or of its group on other machines."""
    if config.swarm_key or config.membership or config.open_to_clients or os.environ.get(ENVIRONMENT):
        from swarm_protocol.access.swarm_access import read_member
        from swarm_protocol.access.tokens import Role

        read_member(Role.SERVER, config.membership, config.swarm_key, open_to_clients=config.open_to_clients)
    if config.group_key is not None:
        read_group_key(config.group_key, create=config.follow is None)


def _command(args: argparse.Namespace, argv: list[str], train: Train | None) -> Command:
    """Return the command to run. Raise ValueError if an argument is wrong."""
    if args.train is None:
        if args.then_serve is not None:
            raise ValueError("--then-serve is for a run: expected --train RUN.toml with it")
        if args.report:
            raise ValueError("--report is for a run: expected --train RUN.toml with it")
        require_members(args, argv)
        config = read_config(args)
        if config.follow is not None:
            require_follow_flags(argv)
        check_files(config)
        return lambda: run(config) if config.follow is None else follow(config)
    require_train_flags(argv)
    if train is None:
        raise ValueError(f"--train: this process does not train; expected `{typed('server')}`")
    return train(args)


def main(
    argv: list[str] | None = None, all_parsers: Callable[[], Parsers] | None = None, train: Train | None = None
) -> None:
    """Run the command, and end the process. Its exit code is 1 after a failure, and 2 if an argument is wrong."""
    try:
        args = parse_args(argv, all_parsers)
        start_logging(args, logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        command = _command(args, sys.argv[1:] if argv is None else argv, train)
    except (SwarmError, ValueError) as error:
        say_error(error)
        sys.exit(2)
    spin_little()
    code = 0
    try:
        command()
    except (SwarmError, ValueError) as error:
        say_error(error)
        code = 1
    except KeyboardInterrupt:
        code = signals.INTERRUPTED
    remove_scratch()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # a thread that still loads or computes must not keep the process alive
