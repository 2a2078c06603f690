"""The descriptors and files that ``swarm serve --workers N`` shares with each of its worker processes."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

IDENTITY = "identity"  # a key file in ``WorkerShare.directory``
_VARIABLE = "SWARM_SERVE_WORKER"


@dataclass(frozen=True)
class WorkerShare:
    """The descriptors and files that the parent process shares with one worker.

    Attributes:
        number: the number of the worker, from 0. Worker 0 answers batches.
        connection: the descriptor of the worker's connection to ``AdmissionService``.
        directory: a directory of the gateway, which is removed when the gateway ends.
    """

    number: int
    listener: int
    connection: int
    directory: str

    @classmethod
    def of_this_process(cls) -> WorkerShare | None:
        """Return what this process shares with its parent; None if it is no worker."""
        text = os.environ.get(_VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def environment(self) -> dict[str, str]:
        """Return the variable by which ``of_this_process`` finds this share."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @property
    def identity(self) -> Path:
        """Return the path of a key file, which makes all workers one client to servers."""
        return Path(self.directory) / IDENTITY

    def files(self, files: dict[str, Any]) -> dict[str, Any]:
        """Return ``files``, fields of ``ServeSettings``, with a shared file where one process keeps all in memory."""
        directory = Path(self.directory)
        history = str(directory / "history.sqlite") if files["history"] == "none" else files["history"]
        return files | {"history": history, "responses": files["responses"] or directory / "responses.sqlite"}

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """Return the listening socket and the connection, which children of this process do not inherit."""
        for descriptor in (self.listener, self.connection):
            os.set_inheritable(descriptor, False)
        return socket.socket(fileno=self.listener), socket.socket(fileno=self.connection)
