"""The identity of a peer: its libp2p key, and the peer id derived from the key."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.message import DecodeError

from swarm_protocol.atomic_file import write_new
from swarm_protocol.file_lock import try_lock
from swarm_protocol.net.hivemind_parts import PeerID, RSAPrivateKey, RSAPublicKey, crypto_pb2
from swarm_protocol.process.scratch import scratch_directory

MIN_KEY_BITS, MAX_KEY_BITS = 2048, 8192  # libp2p's own bounds
_LOCK_WAIT_S = 3.0  # a killed process keeps its files until the kernel has ended it
_LOCK_RETRY_S = 0.05


class Identity:
    """An RSA key in libp2p's file format. It signs records, and the peer id is derived from it."""

    def __init__(self, private_key: RSAPrivateKey, lock: IO[bytes] | None = None) -> None:
        self.lock = lock  # held open as long as this process uses a key file
        self.private_key = private_key
        self.public_key: bytes = private_key.get_public_key().to_bytes()  # as ``peer_id_of`` reads it
        self.rsa_key: rsa.RSAPrivateKey = private_key._private_key
        self.peer_id = peer_id_of_key(self.rsa_key.public_key())

    @classmethod
    def generate(cls) -> Identity:
        return cls(RSAPrivateKey())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file, or write a new one if there is none.

        Raises:
            ValueError: the file is no key, its directory is missing, or another process of this machine uses it.
        """
        if not path.parent.is_dir():
            raise ValueError(f"cannot create the identity file {path}: directory {path.parent} does not exist")
        if path.is_dir():
            raise ValueError(f"identity {path} is a directory, expected a key file")
        try:
            if not path.exists():
                write_new(path, cls.generate().to_bytes())
        except OSError as error:
            raise ValueError(f"cannot use the identity file {path}: {error.strerror}") from None
        lock = locked_key_file(path)
        try:
            return cls.from_bytes(lock.read(), str(path), lock)
        except ValueError:
            lock.close()
            raise

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Load a client's key file, which several processes may share; raise ValueError if it holds no key."""
        try:
            return cls.from_bytes(path.read_bytes(), str(path))
        except OSError as error:
            raise ValueError(f"cannot use the identity file {path}: {error.strerror}") from None

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "this", lock: IO[bytes] | None = None) -> Identity:
        """Parse a key in libp2p's format, read from ``where``; raise ValueError if it is no key, or too short."""
        try:
            identity = cls(_rsa_key(data), lock)
        except (DecodeError, ValueError, TypeError):  # TypeError: the key is encrypted
            raise ValueError(f"{where} is no identity file: expected a libp2p RSA private key") from None
        if identity.rsa_key.key_size < MIN_KEY_BITS:
            raise ValueError(
                f"the key in {where} has {identity.rsa_key.key_size} bits: expected at least {MIN_KEY_BITS}"
            )
        return identity

    @contextmanager
    def as_file(self) -> Iterator[str]:
        """Yield the path of a private copy for the libp2p daemon, which reads the file when it starts."""
        with file_in_memory(self.to_bytes()) as path:
            yield path

    def to_bytes(self) -> bytes:
        """Return the private key in libp2p's format."""
        message = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=self.private_key.to_bytes())
        serialized: bytes = message.SerializeToString()
        return serialized


@contextmanager
def file_in_memory(data: bytes) -> Iterator[str]:
    """Yield a path for libraries that can read keys only from files; only this user can read the file.

    The file is in memory on Linux. Elsewhere it is in the scratch directory while the context is active.
    """
    if not hasattr(os, "memfd_create"):
        path = scratch_directory() / f"key-{secrets.token_hex(8)}"
        try:
            write_new(path, data)
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
        return
    with open(os.memfd_create("identity"), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"  # not /proc/self: the libp2p daemon opens it


def locked_key_file(path: Path) -> IO[bytes]:
    """Open a key file and lock it, because two servers with one key would be the same peer.

    The call waits up to three seconds for a process that is ending.

    Raises:
        ValueError: another process uses the file, or the file cannot be read.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  (closing it would release the lock)
    except OSError as error:
        raise ValueError(f"cannot use the identity file {path}: {error.strerror}") from None
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not try_lock(file):
        if time.monotonic() >= deadline:
            file.close()
            raise ValueError(f"identity {path} is in use by another process of this machine: use another")
        time.sleep(_LOCK_RETRY_S)
    return file


def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p peer id of an OpenSSH-encoded RSA public key.

    Raises:
        ValueError: the bytes are no such key, or the key is too short to be trusted.
    """
    try:
        key: rsa.RSAPublicKey = RSAPublicKey.from_bytes(public_key)._public_key
    except (UnsupportedAlgorithm, AssertionError, ValueError):  # hivemind's text has the address of an object in it
        raise ValueError("the key is no RSA key: expected one in OpenSSH's format") from None
    if not MIN_KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        raise ValueError(f"the RSA key has {key.key_size} bits: expected {MIN_KEY_BITS} to {MAX_KEY_BITS}")
    return peer_id_of_key(key)


def verified_signer(
    data: bytes, public_key: bytes, signature: bytes, wrong: str = "a signature of {} is wrong", no_key: str = ""
) -> str:
    """Return the id of the peer that has signed the data.

    The data begin with a prefix that no other kind of signed data has. ``wrong`` is the message about a wrong
    signature, in which {} stands for the peer id. ``no_key`` is the message about a key that no peer can have.

    Raises:
        ValueError: the signature is wrong, or the public key is no peer's.
    """
    try:
        peer_id = peer_id_of(public_key)
    except ValueError as error:
        raise ValueError(no_key or str(error)) from None
    if not RSAPublicKey.from_bytes(public_key).verify(data, signature):
        raise ValueError(wrong.format(peer_id))
    return peer_id


def peer_id_of_key(public_key: rsa.RSAPublicKey) -> str:
    """Return the peer id of a key, see the libp2p specification, "Peer Ids"."""
    der = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    multihash = b"\x12\x20" + hashlib.sha256(message).digest()  # 0x12: SHA-256, 0x20: 32 bytes
    peer_id: str = PeerID(multihash).to_base58()
    return peer_id


def _rsa_key(serialized: bytes) -> RSAPrivateKey:
    message = crypto_pb2.PrivateKey.FromString(serialized)
    if message.key_type != crypto_pb2.KeyType.RSA:
        raise ValueError("the key is not an RSA key")
    # hivemind reads a private key only where it unpickles one, and its constructor would generate another.
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": message.data})
    return key
