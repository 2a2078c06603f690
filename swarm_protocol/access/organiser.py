"""The key of a private swarm: the private half that its organiser signs with, and the public half that peers know."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm_protocol.atomic_file import write_new
from swarm_protocol.wire.printable import printable

KEY_BYTES = 32
_PADDING = "===="  # the 52 base32 characters of a key need this padding
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class SwarmKey:
    """The organiser's public key. It names the swarm: 52 lower-case letters and digits (base32), not secret."""

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != KEY_BYTES:
            raise ValueError(f"a swarm key of {len(self.data)} bytes: expected {KEY_BYTES}")

    @classmethod
    def parse(cls, text: str) -> SwarmKey:
        """Parse the text form of a key; raise ValueError if the text is not a key."""
        try:
            key = cls(base64.b32decode(text.strip().upper() + _PADDING))
        except ValueError:  # includes the errors of base64
            raise ValueError(
                f"{printable(text, _SHOWN_CHARS)!r} is no swarm key: expected the 52 letters and digits that "
                "`swarm keys create` printed"
            ) from None
        return key

    def __str__(self) -> str:
        return base64.b32encode(self.data).decode().lower().rstrip("=")

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.data).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


class OrganiserKey:
    """The organiser's private key, which decides who is a member. Keep it on the organiser's machine."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
        self.public = SwarmKey(private_key.public_key().public_bytes(*raw))

    @classmethod
    def generate(cls) -> OrganiserKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> OrganiserKey:
        """Load the key from a PEM file; raise ValueError if the file cannot be read or holds no such key."""
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except FileNotFoundError:
            raise ValueError(f"there is no organiser's key {path}: make one with `swarm keys create`") from None
        except OSError as error:
            raise ValueError(f"cannot read the organiser's key {path}: {error.strerror}") from None
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the file is encrypted
            key = None  # refused below, as keys of another kind are
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"{path} is no organiser's key: expected the file that `swarm keys create` has written")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key as PEM with mode 600; raise ValueError if the file exists or cannot be written."""
        pem = self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_secret(path, pem)

    def sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file with mode 600, completely or not at all.

    Raises:
        ValueError: the file exists already, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, data)
    except FileExistsError:
        raise ValueError(f"{path} exists already: nothing was written, choose another name") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
