"""Command line of the client: ``swarm generate "Return a list of"``, ``finetune``, ``status``, …

A command is a function that checks its arguments, as far as they say for themselves that they are wrong, and returns
what is to be done: only that imports torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from swarm_client.core.config import ClientConfig
from swarm_client.finetune.settings import add_flags, check_file, from_flags
from swarm_client.gateway.serving import ServeSettings, add_serve_flags, serve
from swarm_client.generation.text_options import ANSWER_TOKENS, TextOptions
from swarm_client.keys.command import add_keys
from swarm_protocol.access.member_flags import ENVIRONMENT, add_member_flags
from swarm_protocol.checkpoints.default_model import DEFAULT_MODEL, check_location, locate
from swarm_protocol.errors import SwarmError
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_version, typed
from swarm_protocol.process.local_registry import checked_name

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.5, 3600.0  # between two pictures of a swarm
_WITH_DEFAULTS = argparse.ArgumentDefaultsHelpFormatter
Command = Callable[[], None]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parse_args(argv: list[str], others: Mapping[str, str] = MappingProxyType({})) -> argparse.Namespace:
    """``others``: commands besides the client's, which are not for it to run, and what they do."""
    parser = argparse.ArgumentParser(
        prog=typed(), description="Use a language model whose blocks are served by a swarm."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, text in others.items():
        commands.add_parser(name, help=text)
    for add in (_add_generate, _add_chat, _add_serve, _add_finetune, _add_status, _add_demo, add_keys):
        add(commands)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if argv[0] not in commands.choices and not argv[0].startswith("-"):
        parser.exit(2, f"error: there is no command {argv[0]!r}: expected {', '.join(commands.choices)}\n")
    return parser.parse_args(argv)


def _add_generate(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate", formatter_class=_WITH_DEFAULTS, help="continue a text, printing it as it is written"
    )
    parser.set_defaults(command=generate_command)
    _add_swarm_flags(parser)
    _add_model_flags(parser)
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=TextOptions.max_new_tokens, metavar="N")
    parser.add_argument("--num-beams", type=int, default=TextOptions.num_beams, metavar="N")


def _add_chat(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat",
        formatter_class=_WITH_DEFAULTS,
        help="a conversation: a line of input each turn",
        description="Ctrl-D or /exit ends the conversation, /reset starts over, Ctrl-C stops an answer. Turns are put "
        "together by the model's chat template; a model without one goes on with the text.",
    )
    parser.set_defaults(command=chat_command)
    _add_swarm_flags(parser)
    _add_model_flags(parser)
    parser.add_argument("--max-new-tokens", type=int, default=ANSWER_TOKENS, metavar="N", help="of one answer")


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        formatter_class=_WITH_DEFAULTS,
        help="an OpenAI-compatible HTTP API over a swarm",
        description="Serves --model and every other model of the swarm, at /v1/chat/completions, /v1/completions and "
        "/v1/models; /health and /metrics are for operators.",
    )
    parser.set_defaults(command=serve_command)
    _add_swarm_flags(parser)
    _add_remote_flags(parser)
    add_serve_flags(parser)


def _add_finetune(commands: Commands) -> None:
    parser = commands.add_parser(
        "finetune",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="train an adapter or prompts on a file of text",
        epilog='A line of .jsonl is {"text": "…"}, or {"prompt": "…", "completion": "…"}, of which the completion is '
        "learned.",
    )
    parser.set_defaults(command=finetune_command)
    _add_swarm_flags(parser)
    add_flags(parser)


def _add_status(commands: Commands) -> None:
    parser = commands.add_parser("status", formatter_class=_WITH_DEFAULTS, help="show the swarm's servers and blocks")
    parser.set_defaults(command=status_command)
    _add_swarm_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="this model only")
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch, a line of it each time")
    parser.add_argument(
        "--watch",
        nargs="?",
        const="2",
        metavar="SECONDS",
        help="show it live, refreshed after so many seconds (2 if not given), until Ctrl-C",
    )


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo", formatter_class=_WITH_DEFAULTS, help="servers write text together; one is killed"
    )
    parser.set_defaults(command=demo_command)
    parser.add_argument("prompt", nargs="?", default=None)
    parser.add_argument("--max-new-tokens", type=int, default=TextOptions.max_new_tokens, metavar="N")
    _add_log_level(parser)


def _add_swarm_flags(command: argparse.ArgumentParser) -> None:
    """Which swarm, and how it is joined."""
    command.add_argument(
        "--initial-peers", nargs="+", default=[], metavar="MULTIADDR", help="members of the swarm to join through"
    )
    command.add_argument("--swarm", default=ClientConfig.swarm, metavar="NAME", help="the swarm's name")
    add_member_flags(command, "the key of the peer that the membership is for, if it came without one")
    _add_log_level(command)


def _add_log_level(command: argparse.ArgumentParser) -> None:
    command.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def _add_model_flags(command: argparse.ArgumentParser) -> None:
    """What model writes text, how it chooses tokens, and on which servers."""
    _add_remote_flags(command)
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


def _add_remote_flags(command: argparse.ArgumentParser) -> None:
    """What model, and on which servers."""
    add, client = command.add_argument, ClientConfig
    add("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH", help="hub name or directory")
    add("--revision", help="branch, tag or commit of a hub model")
    add("--head-quant", default=client.head_quant, metavar="none|int8", help="of the head that makes logits")
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
    add("--standby", action="store_true", help="keep copies of keys and values on other servers")


def generate_command(args: argparse.Namespace) -> Command:
    options = _text_options(args, num_beams=args.num_beams)
    if not args.prompt:
        raise ValueError("the prompt is empty: expected some text to continue")
    connect = _connecting(args)

    def run() -> None:
        from swarm_client.generation.generation import load_tokenizer, stream_text

        signals.unwind_on_signals()
        with connect() as model:
            stream_text(model, load_tokenizer(args.model, args.revision), args.prompt, options)

    return run


def chat_command(args: argparse.Namespace) -> Command:
    options = _text_options(args)
    connect = _connecting(args)

    def run() -> None:
        from swarm_client.generation.chat import Conversation, chat
        from swarm_client.generation.generation import load_tokenizer

        signals.unwind_on_signals()
        with connect() as model:
            tokenizer = load_tokenizer(args.model, args.revision)
            chat(Conversation(model, tokenizer, options), interactive=sys.stdin.isatty() and sys.stdout.isatty())

    return run


def _text_options(args: argparse.Namespace, **more: int) -> TextOptions:
    return TextOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        **more,
    )


def _connecting(args: argparse.Namespace) -> Callable[[], RemoteModelMixin]:
    """Connects the model that the flags ask for; they are checked now."""
    trained_here = args.adapter is not None and Path(args.adapter).is_dir()
    if args.adapter and "/" in args.adapter and not trained_here:
        raise ValueError(f"--adapter {args.adapter} is no directory: expected that of a trained adapter")
    config = _remote_config(args, "" if trained_here else args.adapter or "")

    def connect() -> RemoteModelMixin:
        from swarm_client.adapters.trained import add_trained
        from swarm_client.model.model import DistributedModel

        model = DistributedModel.from_pretrained(args.model, config=config, revision=args.revision)
        if trained_here:
            try:
                add_trained(model, args.adapter)
            except BaseException:
                model.close()
                raise
        return model

    return connect


def _remote_config(args: argparse.Namespace, adapter: str = "") -> ClientConfig:
    """Of the flags that say which model and which servers; they are checked now."""
    check_location(locate(args.model), args.revision)
    config = ClientConfig(
        initial_peers=tuple(args.initial_peers),
        swarm=checked_name(args.swarm),
        wait_timeout_s=args.wait,
        recovery_timeout_s=args.recovery_timeout,
        standby=args.standby,
        head_quant=args.head_quant,
        allowed_servers=tuple(args.allow),
        blocked_servers=tuple(args.block),
        adapter=adapter,
        **_member_fields(args),
    )
    check_access(config)
    return config


def _member_fields(args: argparse.Namespace) -> dict[str, Any]:
    return {"swarm_key": args.swarm_key, "membership": args.membership, "identity": args.identity}


def check_access(config: ClientConfig) -> None:
    """Raises ValueError if the client cannot come as the member that it is to be."""
    if config.swarm_key or config.membership or config.identity or os.environ.get(ENVIRONMENT):
        from swarm_client.core.access import ClientAccess

        ClientAccess.of(config)


def serve_command(args: argparse.Namespace) -> Command:
    config, settings = _remote_config(args), ServeSettings.from_flags(args)

    def run() -> None:
        signals.unwind_on_signals()
        serve(settings, config, args.model, args.revision)

    return run


def finetune_command(args: argparse.Namespace) -> Command:
    settings = from_flags(args)
    check_access(settings.client_config())
    check_location(locate(settings.model), settings.revision)
    for path in (settings.data, settings.validation):
        if path is not None:
            check_file(path)
    command = f"{typed()} {shlex.join(sys.argv[1:])}"

    def run() -> None:
        from swarm_client.finetune.finetune import run_finetune

        signals.unwind_on_signals()
        if not run_finetune(settings, command):
            sys.exit(signals.INTERRUPTED)

    return run


def status_command(args: argparse.Namespace) -> Command:
    config = ClientConfig(
        initial_peers=tuple(args.initial_peers), swarm=checked_name(args.swarm), **_member_fields(args)
    )
    check_access(config)
    interval_s = None if args.watch is None else parse_interval(args.watch)

    def run() -> None:
        from rich.console import Console

        from swarm_client.core import background
        from swarm_client.monitor.status import as_json, read_status, show
        from swarm_client.monitor.watch import watch

        signals.unwind_on_signals()
        if interval_s is not None:
            watch(config, args.model, interval_s, json_lines=args.json)
            return
        snapshot = background.run(read_status(config, args.model))
        if args.json:
            print(json.dumps(as_json(args.swarm, snapshot), indent=2))
        else:
            show(Console(), args.swarm, snapshot)

    return run


def parse_interval(text: str) -> float:
    """Raises ValueError if it is not a number of seconds to wait between two pictures."""
    try:
        interval_s = float(text)
    except ValueError:
        interval_s = float("nan")
    if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
        raise ValueError(f"--watch is {text!r}: expected a number of seconds from {_MIN_INTERVAL_S:g} to 3600")
    return interval_s


def demo_command(args: argparse.Namespace) -> Command:
    options = TextOptions(max_new_tokens=args.max_new_tokens, temperature=0)

    def run() -> None:
        from swarm_client.demo.demo import DEFAULT_PROMPT, run_demo

        signals.unwind_on_signals()
        run_demo(args.prompt or DEFAULT_PROMPT, options)

    return run


def main(argv: list[str] | None = None, others: Mapping[str, str] = MappingProxyType({})) -> None:
    args = parse_args(sys.argv[1:] if argv is None else argv, others)
    logging.basicConfig(stream=sys.stderr, level=args.log_level.upper(), format="%(message)s")
    # Other people's libraries speak up only if something is wrong.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("httpx", "huggingface_hub", "asyncio", "grpc", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        run = args.command(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        run()
    except (SwarmError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(signals.INTERRUPTED)
