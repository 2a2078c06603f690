"""Command line of the server: ``swarm server --blocks 10:20``.

Errors in the command line itself are reported before torch is imported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_models.checkpoints.default_model import FROM_SWARM, check_location, locate, with_gguf_file
from swarm_protocol.access.member_flags import CONFIG_RULES, ENVIRONMENT, add_member_flags
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.errors import SwarmError
from swarm_protocol.process import signals
from swarm_protocol.process.config_file import ConfigRules, Parsers, apply_config
from swarm_protocol.process.invocation import add_common_flags, add_version, typed, typed_flags
from swarm_protocol.process.local_registry import checked_name
from swarm_protocol.process.logs import say_error, start_logging
from swarm_protocol.process.scratch import remove_scratch
from swarm_protocol.span import Span
from swarm_server.core.config import ServerConfig, parse_size

if TYPE_CHECKING:
    from swarm_server.node.server import Server

Command = Callable[[], None]
Train = Callable[[argparse.Namespace], Command]  # returns the command for `--train`; raises ValueError
_TRAIN_FLAGS = [
    *("train", "then-serve", "quant", "blocks", "initial-blocks", "memory", "device", "host", "port", "dht-port"),
    *("announce-address", "initial-peers", "identity", "membership", "log-level", "log-format", "config"),
]
_LEAVE_S = 20.0  # for all that must be done after draining
_CONFIG_RULES = ConfigRules(
    CONFIG_RULES.environment, (("blocks", "initial-blocks", "num-blocks", "memory"), ("cache-tokens", "cache-memory"))
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("server"),
        description="Host transformer blocks of a Hugging Face model for a swarm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, default = parser.add_argument, ServerConfig
    add(
        "--model",
        metavar="NAME_OR_PATH",
        help="name on the hub, directory, GGUF file, smollm2, or swarm://NAME to take the files from other members; if "
        f"not given, the only model of the swarm at --initial-peers, else {default.model}",
    )
    add(
        "--share-weights",
        default=default.share_weights,
        metavar="auto|always|never|RATE",
        help="whether members without a copy get the model's files, or at most how many bytes per second, such as "
        "10MB. auto: yes, but outside a private swarm only models that anybody can download",
    )
    add(
        "--weights",
        default=default.weights,
        metavar="SHA256",
        help="SHA-256 of the list of files to take from members, as their logs show it; with --model swarm://NAME; if "
        "not given, what most members offer",
    )
    add("--revision", help="branch, tag or commit of a hub model")
    add("--gguf-file", metavar="NAME", help="of a model that has several GGUF files: the one to take")
    add(
        "--train",
        type=Path,
        metavar="RUN.toml",
        help="hold a stage of this run, and train it with others, instead of serving a model",
    )
    add(
        "--then-serve",
        type=Path,
        metavar="DIR",
        help="with --train: after the run's last step, write the model to this directory and serve the stage's blocks",
    )
    add("--blocks", metavar="START:END", help="blocks to host for good; without it the server chooses")
    add("--initial-blocks", metavar="START:END", help="blocks to host at first; it moves if others need it more")
    add("--num-blocks", type=int, metavar="N", help="how many blocks to host, where the swarm needs them most")
    add(
        "--memory",
        metavar="SIZE",
        help="for blocks, keys and values, such as 4GiB; decides how many blocks; with --train: of the process",
    )
    add(
        "--quant",
        default=default.quant,
        help="int8, int4 (on CPU), nf4, none, or bnb-int8 (slow on CPU, for comparison)",
    )
    add("--dtype", default=default.dtype, help="of computation: auto, float32, bfloat16 or float16")
    add("--device", default=default.device, help="auto, cpu, cuda, cuda:1, …")
    add(
        "--devices",
        default="",
        metavar="DEVICE,…",
        help="several devices of one type, such as cuda:0,cuda:1: the blocks are split over them by free memory",
    )
    add(
        "--host",
        metavar="ADDRESS",
        help="to listen on; by default the one that leads to the swarm, and for a new swarm the loopback: only this "
        "machine can join",
    )
    add("--port", type=int, default=default.port, help="gRPC port; 0 takes a free one")
    add("--dht-port", type=int, default=default.dht_port, help="libp2p port; 0 takes a free one")
    add("--announce-address", metavar="HOST[:PORT]", help="how others reach this server, if not at --host")
    add(
        "--relay",
        default=default.relay,
        metavar="auto|always|never",
        help="let others reach this server through members that relay; auto does so if they cannot reach it directly, "
        "as behind a home router",
    )
    add(
        "--relay-for-others",
        default=f"{default.relay_bytes_per_s // 10**6}MB",
        metavar="SIZE",
        help="per second that this server, if it can be reached, relays for others that cannot; 0: nothing",
    )
    add(
        "--relay-keepalive",
        type=float,
        default=default.relay_keepalive_s,
        metavar="SECONDS",
        help="between two signs of life to relays, so that routers do not forget the connection",
    )
    add("--initial-peers", nargs="+", default=[], metavar="MULTIADDR", help="members of the swarm to join")
    add(
        "--discover",
        action="store_true",
        help="look for members on the local network besides, and let others find this server there",
    )
    add("--swarm", default=default.swarm, metavar="NAME", help="name of the swarm to join or start on this machine")
    add_member_flags(parser, "key file; keeps the peer id over restarts")
    add(
        "--open-to-clients", action="store_true", help="of a private swarm: members alone are servers, anybody a client"
    )
    add("--cache-tokens", type=int, metavar="N", help="KV-cache room over all sessions; default from free memory")
    add("--cache-memory", metavar="SIZE", help="the same as memory, such as 2GiB or 500MB")
    add(
        "--prefix-cache",
        default=default.prefix_cache,
        metavar="auto|all|own|none",
        help="share keys and values of equal prefixes of prompts between all clients, or among those of each client; "
        "auto is all in a private swarm and on one machine, and own among strangers",
    )
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_const",
        const="none",
        default=argparse.SUPPRESS,
        help="the same as --prefix-cache none",
    )
    add(
        "--weight-cache",
        default=f"{default.weight_cache_bytes >> 30}GiB",
        metavar="SIZE",
        help="for packed weights in the user's cache directory, which later starts read instead of packing them again",
    )
    add(
        "--no-weight-cache",
        dest="weight_cache",
        action="store_const",
        const="0",
        default=argparse.SUPPRESS,
        help="neither read nor write packed weights; the same as --weight-cache 0",
    )
    add("--adapters", type=Path, nargs="+", default=[], metavar="PATH", help="LoRA adapters of PEFT's format to offer")
    add(
        "--adapter-memory",
        default=f"{default.adapter_bytes >> 20}MiB",
        metavar="SIZE",
        help="for adapters that clients send",
    )
    add(
        "--incoming-memory",
        default=f"{default.incoming_bytes >> 20}MiB",
        metavar="SIZE",
        help="for requests that are arriving, in all; more are refused",
    )
    add("--chunk-tokens", type=int, metavar="N", help="positions of a prompt computed at a time; default by device")
    add("--max-sessions", type=int, default=default.max_sessions, metavar="N", help="generations at a time")
    add(
        "--drain-timeout",
        type=float,
        default=default.drain_timeout_s,
        metavar="SECONDS",
        help="for generations to end or move when the server drains; a second signal exits at once",
    )
    add(
        "--balance-margin",
        type=float,
        default=default.balance_margin,
        metavar="SHARE",
        help="move to other blocks only if the swarm can then carry so much more, 0.03 being 3 %%",
    )
    add("--throughput", default="auto", metavar="auto|N", help="tokens/s to announce; auto measures")
    add("--metrics-port", type=int, metavar="N", help="of metrics for Prometheus; 0: one that is free")
    add("--metrics-host", default=default.metrics_host, metavar="ADDRESS", help="where they are served")
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
    try:
        throughput = None if args.throughput == "auto" else float(args.throughput)
    except ValueError:
        raise ValueError(f"throughput {args.throughput!r} is not understood: expected auto or a number") from None
    for peer in args.initial_peers:
        check_peer(peer)
    return ServerConfig(
        num_blocks=args.num_blocks,
        memory_bytes=None if args.memory is None else parse_size(args.memory),
        cache_bytes=None if args.cache_memory is None else parse_size(args.cache_memory),
        weight_cache_bytes=parse_size(args.weight_cache),
        prefix_cache=args.prefix_cache,
        adapters=tuple(args.adapters),
        adapter_bytes=parse_size(args.adapter_memory),
        incoming_bytes=parse_size(args.incoming_memory),
        chunk_tokens=args.chunk_tokens,
        max_sessions=args.max_sessions,
        model=with_gguf_file(args.model or _usual_model(args), args.gguf_file),
        share_weights=args.share_weights,
        weights=args.weights,
        model_revision=args.revision,
        blocks=None if args.blocks is None else Span.parse(args.blocks),
        initial_blocks=None if args.initial_blocks is None else Span.parse(args.initial_blocks),
        quant=args.quant,
        dtype=args.dtype,
        device=args.device,
        devices=tuple(args.devices.split(",")) if args.devices else (),
        host=args.host,
        port=args.port,
        dht_port=args.dht_port,
        announce_address=args.announce_address,
        relay=args.relay,
        relay_bytes_per_s=parse_size(args.relay_for_others),
        relay_keepalive_s=args.relay_keepalive,
        initial_peers=tuple(args.initial_peers),
        discover=args.discover,
        swarm=checked_name(args.swarm),
        identity=args.identity,
        membership=args.membership,
        swarm_key=args.swarm_key,
        open_to_clients=args.open_to_clients,
        cache_tokens=args.cache_tokens,
        throughput=throughput,
        drain_timeout_s=args.drain_timeout,
        balance_margin=args.balance_margin,
        metrics_port=args.metrics_port,
        metrics_host=args.metrics_host,
    )


def _usual_model(args: argparse.Namespace) -> str:
    """Return the model to serve if none is named."""
    joins_others = (args.initial_peers or args.discover) and args.gguf_file is None
    return FROM_SWARM if joins_others else ServerConfig.model


def require_train_flags(argv: list[str]) -> None:
    """Raise ValueError if a flag was given that does not apply to a stage of a run."""
    typed_here = typed_flags(make_parser(), argv)
    if "quant" in typed_here and "then-serve" not in typed_here:
        raise ValueError("--quant with --train is for what is served afterwards: expected --then-serve DIR with it")
    if wrong := sorted(typed_here - set(_TRAIN_FLAGS)):
        named = " and ".join(f"--{flag}" for flag in wrong)
        raise ValueError(
            f"{named}: not together with --train, which takes no others than "
            + ", ".join(f"--{flag}" for flag in _TRAIN_FLAGS[1:])
        )


def check_files(config: ServerConfig) -> None:
    """Raise ValueError if a file is not where the arguments say."""
    if not config.model.startswith(FROM_SWARM):
        check_location(locate(config.model), config.model_revision)
    if config.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
        raise ValueError("--metrics-port needs one more package: pip install 'swarm-lm[metrics]'")
    if config.identity is not None and not config.identity.parent.is_dir():
        raise ValueError(f"identity {config.identity} cannot be made: {config.identity.parent} is no directory")
    if config.swarm_key or config.membership or config.open_to_clients or os.environ.get(ENVIRONMENT):
        from swarm_server.core.access import read_member

        read_member(config)
    for path in config.adapters:
        if not path.is_dir():
            raise ValueError(f"adapter {path} is no directory: expected one in PEFT's format")


async def serve(server: Server) -> None:
    """Run the server until it ends, or has drained after a signal."""
    running = asyncio.ensure_future(server.run())
    received: list[signal.Signals] = []

    def leave(number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            signals.leave_terminal()
            if received:  # a terminal that closes may send two signals
                return
        received.append(number)
        if len(received) > 1:
            os._exit(signals.INTERRUPTED)
        server.stop()
        # This timer ends the server after a signal, whatever hangs.
        asyncio.get_running_loop().call_later(server.config.drain_timeout_s + _LEAVE_S, os._exit, 1)
        if not server.ready:
            running.cancel()

    for number in (signal.SIGINT, *signals.ending_signals()):
        asyncio.get_running_loop().add_signal_handler(number, leave, number)
    try:
        await running
    except asyncio.CancelledError:
        if not received:
            raise


def run(config: ServerConfig) -> None:
    """Serve until a signal ends the server.

    Raises:
        ValueError, SwarmError: see ``Server.run``.
    """
    from swarm_protocol.imports.light_imports import collected_later, import_transformers

    with collected_later():
        import uvloop

        import_transformers()
        from swarm_server.node.server import Server

    # Not uvloop.run(), which would wait after a signal for threads that still load.
    uvloop.new_event_loop().run_until_complete(serve(Server(config)))


def _command(args: argparse.Namespace, argv: list[str], train: Train | None) -> Command:
    """Return the command to run. Raise ValueError if an argument is wrong."""
    if args.train is None:
        if args.then_serve is not None:
            raise ValueError("--then-serve is for a run: expected --train RUN.toml with it")
        config = read_config(args)
        check_files(config)
        return lambda: run(config)
    require_train_flags(argv)
    if train is None:
        raise ValueError(f"--train: this process does not train; expected `{typed('server')}`")
    return train(args)


def main(
    argv: list[str] | None = None, all_parsers: Callable[[], Parsers] | None = None, train: Train | None = None
) -> None:
    try:
        args = parse_args(argv, all_parsers)
        start_logging(args, logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        command = _command(args, sys.argv[1:] if argv is None else argv, train)
    except (SwarmError, ValueError) as error:
        say_error(error)
        sys.exit(2)
    # Read when torch is imported. OpenMP's threads spin for milliseconds after a product. With another process on the
    # same cores, a block took 8 to 80 ms; with this little spinning, it takes 4 [on idle cores 2.4 instead of 2.2].
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
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
