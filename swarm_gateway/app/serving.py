"""The flags of ``swarm serve``, and its server. Packages of the server are imported only when it starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_client.core.config import ClientConfig
from swarm_gateway.app.worker_share import IDENTITY, WorkerShare
from swarm_gateway.limits.admission import DEFAULT_LIMITS, GatewayLimits, LocalAdmission, read_keys
from swarm_gateway.limits.remote_admission import RemoteAdmission
from swarm_protocol.config_flags import ConfigFlags, Flag
from swarm_protocol.net.hosts import is_loopback_host
from swarm_protocol.process import signals
from swarm_protocol.wire.printable import printable

if TYPE_CHECKING:
    from fastapi import FastAPI

_PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
_BACKLOG = 2048  # connections that wait to be accepted
SERVING_ON = "serving on "  # before the address of the API, in the first line on stdout
_DRAIN_S = 5  # the time for active answers to end after Ctrl-C


@dataclass(frozen=True)
class ServeSettings:
    """The settings of ``swarm serve``. Construction raises ValueError if other machines could ask without a key."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free port
    keys: tuple[str, ...] = ()
    limits: GatewayLimits = DEFAULT_LIMITS
    history: str | None = None  # a file, or "none"; None: a file in the user's data directory
    responses: Path | None = None  # a file for what /v1/responses stores; None: in memory
    batches: Path | None = None  # a file for /v1/files and /v1/batches; None: there are none
    workers: int = 1  # processes that answer requests
    share: WorkerShare | None = None  # of a worker with its parent; None: this process is no worker

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port is {self.port}: expected 0 to 65535")
        if self.workers < 1:
            raise ValueError(f"--workers is {self.workers}: expected at least 1")
        if self.workers > 1 and os.name != "posix":
            raise ValueError(f"--workers is {self.workers}: expected 1, because this system cannot share a socket so")
        if not self.keys and not is_loopback_host(self.host):
            raise ValueError(
                f"--host {self.host} is reached from other machines: give --api-keys FILE, with a key in each line"
            )

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> ServeSettings:
        """Return the settings of parsed flags. Raise ValueError also if a package is missing."""
        if any(importlib.util.find_spec(package) is None for package in _PACKAGES):
            raise ValueError("serve needs more packages: pip install 'swarm-lm[serve]'")
        keys = () if args.api_keys is None else read_keys(args.api_keys)
        limits = GatewayLimits(**_LIMITS.values(args))
        files, share = _FILES.values(args), WorkerShare.of_this_process()
        files = files if share is None else share.files(files)
        return cls(keys=keys, limits=limits, share=share, **_PLACE.values(args), **files)


_PLACE = ConfigFlags(
    ServeSettings,
    Flag("host", "address to listen on; one that other machines reach needs --api-keys"),
    Flag("port", "port to listen on; 0: any free port", metavar="N"),
    Flag("workers", "processes that answer requests, behind the one port", metavar="N"),
)
_LIMITS = ConfigFlags(
    GatewayLimits,
    Flag("max_active", "most generations at the same time", metavar="N"),
    Flag("max_queued", "most generations that wait for a turn", metavar="N"),
    Flag("requests_per_minute", "most requests of each key; by default without limit", metavar="N"),
)
_FILES = ConfigFlags(
    ServeSettings,
    Flag("history", "file for the history of the swarm; by default in the user's data directory", metavar="FILE|none"),
    Flag("responses", "file for responses that later requests continue; by default in memory", metavar="FILE"),
    Flag("batches", "take batches of requests, and keep them in this file", metavar="FILE"),
)


def add_serve_flags(command: argparse.ArgumentParser) -> None:
    _PLACE.add_to(command)
    command.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="file with a key in each line; requests without a key are refused",
    )
    _LIMITS.add_to(command)
    _FILES.add_to(command)


def serve_by_workers(settings: ServeSettings, command: Sequence[str]) -> None:
    """Serve until a signal, in processes that run ``command``, which is that of this process.

    Raises:
        ValueError: the gateway cannot listen at the address, or a file cannot be used.
        SwarmError: a worker was ended from outside before all were ready.
        SystemExit: a worker has failed at its start, and has said why.
    """
    from swarm_gateway.app.workers import WorkerPool
    from swarm_gateway.batch_api.store import BatchStore
    from swarm_protocol.net.identity import Identity
    from swarm_protocol.process.scratch import scratch_directory

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(settings.host, settings.port)))
        if settings.batches is not None:  # keeps other gateways away from the file
            stack.enter_context(contextlib.closing(BatchStore(settings.batches)))
        directory = scratch_directory()
        Identity.load_or_create(directory / IDENTITY)
        admission = LocalAdmission(settings.limits, is_shared=len(settings.keys) > 1, num_workers=settings.workers)

        async def run_workers() -> int:
            return await WorkerPool(command, settings.workers, admission, listener, directory).run()

        if code := asyncio.run(run_workers()):
            sys.exit(code)


def serve(settings: ServeSettings, config: ClientConfig, model: str, revision: str | None) -> None:
    """Serve until a signal, in this process.

    Raises:
        ValueError: the gateway cannot listen at the address, or a file cannot be used.
        CheckpointError, UnsupportedModel, NoSwarm: see ``check_model``.
    """
    from swarm_client.batching.loop import GenerationLoop
    from swarm_client.core import background
    from swarm_client.core.access import client_access
    from swarm_gateway.app.app import create_app
    from swarm_gateway.batch_api.store import BatchStore
    from swarm_gateway.history.opening import open_history
    from swarm_gateway.history.recorder import HistoryRecorder
    from swarm_gateway.monitor.monitor import Monitor
    from swarm_gateway.monitor_api.endpoints import Monitored
    from swarm_gateway.responses_api.store import ResponseStore
    from swarm_gateway.web.models import SwarmModels, check_model
    from swarm_protocol.telemetry.exporting import start

    share = settings.share
    remote: RemoteAdmission | None = None
    if share is not None and config.identity is None and not client_access(config).token:
        config = replace(config, identity=share.identity)
    model, files = check_model(model, revision, config)
    with contextlib.ExitStack() as stack:
        if share is None:
            listener = listen(settings.host, settings.port)
        else:
            listener, connection = share.sockets()
            remote = RemoteAdmission(settings.limits, connection)
        stack.enter_context(contextlib.closing(listener))
        telemetry = stack.enter_context(contextlib.closing(start("swarm-gateway")))
        responses = ResponseStore(settings.responses)
        batches = None if settings.batches is None else BatchStore(settings.batches, locks=share is None)
        recorder = HistoryRecorder(Monitor(config), open_history(settings.history, config.swarm))
        models = SwarmModels(config, model, revision, GenerationLoop, files=files, monitor=recorder)
        is_private = client_access(config).control is not None
        monitored = Monitored(recorder, config, models.own, is_private, models.own_is_directory)
        app = create_app(
            models,
            settings.limits,
            settings.keys,
            monitored=monitored,
            responses=responses,
            batches=batches,
            telemetry=telemetry,
            admission=remote,
            answers_batches=share is None or share.number == 0,
        )
        background.run(recorder.start())
        try:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the normal ways to end
                run(app, listener, _greeting(settings, listener, models.own), remote)
        finally:
            models.close()
            responses.close()
            if batches is not None:
                batches.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise ValueError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use: expected another --port, or 0 for a free one") from None
        raise ValueError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from None


def run(app: FastAPI, listener: socket.socket, greeting: Sequence[str], remote: RemoteAdmission | None = None) -> None:
    """Serve until a signal. Print the lines of the greeting once the server accepts connections.

    ``remote``: a worker's connection to its parent, which prints the greeting instead. The worker ends with the parent.
    """
    import uvicorn

    from swarm_gateway.app.connections import IncomingRequests, protocol_of

    class GatewayServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = signal.getsignal(signal.SIGINT)
            with super().capture_signals():
                if before is signal.SIG_IGN:  # in the background of a shell, where uvicorn would listen all the same
                    signal.signal(signal.SIGINT, before)
                yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            if remote is not None:
                await remote.start(on_lost=self.end)
            await super().startup(sockets)
            if remote is not None:
                remote.say_ready(greeting)
            else:
                print(*greeting, sep="\n", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # cutting answers off now is no error
            await super().shutdown(sockets)

        def end(self) -> None:
            self.should_exit = True

    # Uvicorn's own logging would write a line for each request.
    options = uvicorn.Config(
        app,
        http=protocol_of(IncomingRequests.of_this_process()),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )
    server = GatewayServer(options)
    with signals.held(server.end):
        server.run([listener])


def _greeting(settings: ServeSettings, listener: socket.socket, model: str) -> list[str]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    page = f"http://{host}:{listener.getsockname()[1]}/"
    url = f"{page}v1"
    key = " -H 'Authorization: Bearer KEY'" if settings.keys else ""
    body = shlex.quote(f'{{"model": "{printable(model)}", "prompt": "Return a list of"}}')
    curl = f"curl {url}/completions{key} -H 'Content-Type: application/json' -d {body}"
    return [f"{SERVING_ON}{url}", f"  in a browser: {page} and {page}monitor", f"  {curl}"]
