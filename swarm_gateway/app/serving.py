"""The flags of ``swarm serve``, and its server. Packages of the server are imported only when it starts."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import logging
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_client.core.config import ClientConfig
from swarm_gateway.limits.admission import DEFAULT_LIMITS, GatewayLimits, read_keys
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

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port is {self.port}: expected 0 to 65535")
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
        return cls(keys=keys, limits=limits, **_PLACE.values(args), **_FILES.values(args))


_PLACE = ConfigFlags(
    ServeSettings,
    Flag("host", "address to listen on; one that other machines reach needs --api-keys"),
    Flag("port", "port to listen on; 0: any free port", metavar="N"),
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


def serve(settings: ServeSettings, config: ClientConfig, model: str, revision: str | None) -> None:
    """Serve until a signal.

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

    model, files = check_model(model, revision, config)
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        contextlib.closing(start("swarm-gateway")) as telemetry,
    ):
        responses = ResponseStore(settings.responses)
        batches = None if settings.batches is None else BatchStore(settings.batches)
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
        )
        background.run(recorder.start())
        try:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the normal ways to end
                run(app, listener, _greeting(settings, listener, models.own))
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


def run(app: FastAPI, listener: socket.socket, greeting: Sequence[str]) -> None:
    """Serve until a signal. Print the lines of the greeting once the server accepts connections."""
    import uvicorn

    from swarm_gateway.app.connections import IncomingRequests, protocol_of

    class GatewayServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
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
