"""The two keys of a session: the client's own key, and a derived key for peers that may push steps."""

from __future__ import annotations

import hashlib
import secrets


def new_session_key() -> bytes:
    return secrets.token_bytes(16)


def push_key_of(session_key: bytes) -> bytes:
    """Return the push key: its holder can push steps, but cannot find the session key or open another session."""
    return hashlib.sha256(b"push" + session_key).digest()
