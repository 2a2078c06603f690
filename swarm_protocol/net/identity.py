"""Who a peer is: its libp2p key, the peer id derived from it, and the TLS certificate its record vouches for."""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import hashlib
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError

from swarm_protocol.errors import BadReply, PeerUnavailable
from swarm_protocol.net.hivemind_parts import (
    PeerID,
    RSAPrivateKey,
    RSAPublicKey,
    crypto_pb2,
)
from swarm_protocol.wire.printable import printable

# The name in every peer's certificate. Trust comes from the fingerprint in the signed record, not from this name.
_TLS_NAME = "swarm"
_SHOWN_CHARS = 80  # of an address


class Identity:
    """An RSA key in libp2p's file format. Records are signed with it and the peer id is derived from it."""

    def __init__(self, private_key: RSAPrivateKey, lock: IO[bytes] | None = None) -> None:
        self._lock = lock  # held open as long as this process uses a key file
        self.private_key = private_key
        self.peer_id = _peer_id(private_key.get_public_key())

    @classmethod
    def generate(cls) -> Identity:
        return cls(RSAPrivateKey())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Reads the key file, writing a new one if there is none.

        Raises:
            ValueError: the file is no key, its directory is missing, or another process of this machine uses it.
        """
        if not path.parent.is_dir():
            raise ValueError(f"cannot create the identity file {path}: directory {path.parent} does not exist")
        if path.is_dir():
            raise ValueError(f"identity {path} is a directory, expected a key file")
        try:
            if not path.exists():
                _write_key(path, cls.generate()._serialized())
            lock = open(path, "rb")  # noqa: SIM115  (closing it would release the lock)
        except OSError as error:
            raise ValueError(f"cannot use the identity file {path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"identity {path} is in use by another server of this machine: use another") from None
        try:
            return cls(_rsa_key(lock.read()), lock)
        except (DecodeError, ValueError, TypeError):  # TypeError: the key is encrypted
            lock.close()
            raise ValueError(f"{path} is no identity file: expected a libp2p RSA private key") from None

    @contextmanager
    def as_file(self) -> Iterator[str]:
        """The path of a private copy in memory for the libp2p daemon, which reads it when it starts."""
        with open(os.memfd_create("identity"), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(self._serialized())
            file.flush()
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"

    def _serialized(self) -> bytes:
        message = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=self.private_key.to_bytes())
        serialized: bytes = message.SerializeToString()
        return serialized


def _write_key(path: Path, data: bytes) -> None:
    """All or nothing: the disk may be full."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        raise


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an OpenSSH-encoded RSA public key (libp2p specification "Peer Ids").

    Raises:
        ValueError: if it is no such key.
    """
    return _peer_id(RSAPublicKey.from_bytes(public_key))


def _peer_id(public_key: RSAPublicKey) -> str:
    der = public_key._public_key.public_bytes(
        encoding=serialization.Encoding.DER, format=serialization.PublicFormat.SubjectPublicKeyInfo
    )
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    multihash = b"\x12\x20" + hashlib.sha256(message).digest()  # 0x12: SHA-256, 0x20: 32 bytes
    peer_id: str = PeerID(multihash).to_base58()
    return peer_id


def _rsa_key(serialized: bytes) -> RSAPrivateKey:
    message = crypto_pb2.PrivateKey.FromString(serialized)
    if message.key_type != crypto_pb2.KeyType.RSA:
        raise ValueError("the key is not an RSA key")
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": message.data})
    return key


@dataclass(frozen=True)
class Certificate:
    """A self-signed TLS certificate and its key, both PEM."""

    key_pem: bytes
    certificate_pem: bytes

    @classmethod
    def generate(cls) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _TLS_NAME)])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # clocks of volunteers differ
            .not_valid_after(now + datetime.timedelta(days=3650))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(_TLS_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            certificate.public_bytes(serialization.Encoding.PEM),
        )

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the DER certificate."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate_pem.decode())).digest()

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key_pem, self.certificate_pem)])


async def pinned_channel(
    address: str, fingerprint: bytes, options: Sequence[tuple[str, object]], timeout_s: float = 5.0
) -> grpc.aio.Channel:
    """A channel to ``HOST:PORT`` that trusts only the certificate with this SHA-256 fingerprint.

    Raises:
        PeerUnavailable: nobody answers there within ``timeout_s``.
        BadReply: somebody else answers there.
    """
    host, _, port = address.rpartition(":")
    shown = printable(address, _SHOWN_CHARS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default context would read the system's authorities
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint below decides
    context.set_alpn_protocols(["h2"])
    try:
        connecting = asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        _, writer = await asyncio.wait_for(connecting, timeout_s)
    except TimeoutError:
        raise PeerUnavailable(f"no server answered at {shown} within {timeout_s:g} s") from None
    except OSError as error:
        raise PeerUnavailable(f"no server answers at {shown}: {error.strerror or error}") from None
    except (ValueError, OverflowError):  # addresses come from strangers
        raise PeerUnavailable(f"no server answers at {shown!r}: it is no address, expected HOST:PORT") from None
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()  # close() would wait for a goodbye that gRPC does not send, and keep the server waiting
    if hashlib.sha256(der).digest() != fingerprint:
        raise BadReply(f"the server at {shown} shows another TLS certificate than its record promises")
    credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(der).encode())
    return grpc.aio.secure_channel(
        address, credentials, options=[*options, ("grpc.ssl_target_name_override", _TLS_NAME)]
    )
