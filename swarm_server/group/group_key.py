"""The file with the secret that members of a group on several machines share."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

_logger = logging.getLogger(__name__)
KEY_BYTES = 32  # of the secret, and of the AES-256 keys that are derived from it


def read_group_key(path: Path, *, create: bool) -> bytes:
    """Return the key in the file. With ``create``, write a new one if there is no file; only this user can read it.

    Raises:
        ValueError: the file is missing, cannot be used, or holds no key.
    """
    try:
        if create and not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
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
