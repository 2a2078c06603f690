"""The file with the secret that members of a group on several machines share."""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from pathlib import Path

from swarm_protocol.atomic_file import write_new

_logger = logging.getLogger(__name__)
KEY_BYTES = 32  # of the secret, and of the AES-256 keys that are derived from it


def read_group_key(path: Path, *, create: bool) -> bytes:
    """Return the key in the file. With ``create``, write a new one if there is no file; only this user can read it.

    Members that start together on one machine may all try to write the file. Each of them returns the key of the first.

    Raises:
        ValueError: the file is missing, cannot be used, or holds no key.
    """
    try:
        if create and not path.exists():
            with suppress(FileExistsError):  # another member has just written it
                write_new(path, f"{secrets.token_hex(KEY_BYTES)}\n".encode())
                _logger.warning("%s is a new group key: copy it to the other machines before they start", path)
        key = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        raise ValueError(
            f"cannot use the group key {path}: {error.strerror}; the leader of a group makes the file, and each "
            "follower needs a copy"
        ) from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"{path} is no group key: expected {2 * KEY_BYTES} hexadecimal digits, as the leader writes them"
        )
    return key
