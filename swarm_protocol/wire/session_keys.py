"""The two keys of a session: its client's own, and one made from it for whoever may push steps."""

from __future__ import annotations

import hashlib
import secrets


def new_session_key() -> bytes:
    return secrets.token_bytes(16)


def push_key_of(session_key: bytes) -> bytes:
    """Who has it can push and nothing else: neither find the session's key, nor open another with this push key."""
    return hashlib.sha256(b"push" + session_key).digest()
