"""The check that hivemind is installed, which brings the libp2p daemon; it has none for Windows."""

from __future__ import annotations

import importlib.util
import sys

from swarm_protocol.errors import SwarmError


def why_no_libp2p() -> str:
    """Return why this machine cannot be in a swarm, and what to do; an empty string if it can."""
    if importlib.util.find_spec("hivemind") is not None:
        return ""
    if sys.platform == "win32":
        return "Windows has no libp2p daemon, which connects a swarm: install Swarm in WSL, which is Linux"
    return "hivemind is not installed, whose libp2p daemon connects a swarm: pip install hivemind"


def require_libp2p() -> None:
    """Raise SwarmError if this machine cannot be in a swarm."""
    if reason := why_no_libp2p():
        raise SwarmError(reason)
