"""Mutually authenticated connections: a server proves the certificate in its record, and a client proves its key."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from swarm_protocol.errors import AccessDenied, BadReply, PeerUnavailable
from swarm_protocol.net.identity import MIN_KEY_BITS, Identity, file_in_memory, peer_id_of_key
from swarm_protocol.wire.printable import printable

# The name in every peer's certificate. Trust comes from the fingerprint in the signed record, not from this name.
_TLS_NAME = "swarm"

# gRPC accepts a client's certificate only if an authority has signed it. The key of this authority is public, so its
# signature proves nothing. The handshake itself proves that the client has the private key of its certificate.
_AUTHORITY_NAME = "swarm clients"
_AUTHORITY_SECRET = hashlib.sha256(b"the key of this authority is public").digest()
_MOST_KNOWN = 1024  # cached certificates of clients, because each call shows the certificate again
_MAX_PEM_BYTES = 1 << 14  # of a client's certificate: a key of 8192 bits and the longest token take under a quarter
# A client's certificate has its membership token in this extension. The number is random, see ITU-T X.667.
_TOKEN_OID = x509.ObjectIdentifier("2.25.57207744209203973774103382683557686505")
_SHOWN_CHARS = 80  # per address in a message


@dataclass(frozen=True)
class Certificate:
    """A server's self-signed TLS certificate and its key, both PEM."""

    key_pem: bytes
    certificate_pem: bytes

    @classmethod
    def generate(cls) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(_key_pem(key), _certificate_pem(_TLS_NAME, key.public_key(), _TLS_NAME, key))

    @property
    def fingerprint(self) -> bytes:
        """Return the SHA-256 of the DER certificate."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate_pem.decode())).digest()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that require a certificate from clients; ``peer_of`` returns the client's peer id."""
        _, authority_pem = _authority()
        keys = [(self.key_pem, self.certificate_pem)]
        return grpc.ssl_server_credentials(keys, root_certificates=authority_pem, require_client_auth=True)


class ClientCredentials:
    """The credentials that a peer shows to servers: a certificate over the key of its identity."""

    def __init__(self, identity: Identity, token: bytes = b"") -> None:
        """Create the certificate. This takes a few milliseconds, so create one object and reuse it for all connections.

        ``token`` is the membership token in a private swarm, see ``swarm_protocol.access``. Servers read it with
        ``token_of``.
        """
        authority_key, _ = _authority()
        self.peer_id = identity.peer_id
        self._key_pem = _key_pem(identity.rsa_key)
        self._certificate_pem = _certificate_pem(
            identity.peer_id, identity.rsa_key.public_key(), _AUTHORITY_NAME, authority_key, token
        )
        # The default context would read the system's authorities.
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE  # the fingerprint decides
        self._context.set_alpn_protocols(["h2"])
        with file_in_memory(self._key_pem + self._certificate_pem) as path:
            self._context.load_cert_chain(path)

    async def certificate_at(self, address: str, timeout_s: float) -> bytes:
        """Return the certificate, DER, of the server at ``HOST:PORT``; raise PeerUnavailable if no server answers."""
        host, _, port = address.rpartition(":")
        shown = printable(address, _SHOWN_CHARS)
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self._context)
        except TimeoutError:
            raise PeerUnavailable(f"no server answered at {shown} within {timeout_s:g} s") from None
        except OSError as error:
            raise PeerUnavailable(f"no server answers at {shown}: {error.strerror or error}") from None
        except (ValueError, OverflowError):  # addresses come from untrusted records
            raise PeerUnavailable(f"no server answers at {shown!r}: it is no address, expected HOST:PORT") from None
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        # ``close`` would wait for a TLS close message that gRPC does not send, and keep the server waiting.
        writer.transport.abort()
        return der

    def for_server(self, certificate_pem: bytes) -> grpc.ChannelCredentials:
        """Return credentials for channels to the server with this certificate, and to no other."""
        return grpc.ssl_channel_credentials(certificate_pem, self._key_pem, self._certificate_pem)


async def pinned_channel(
    credentials: ClientCredentials,
    address: str,
    fingerprint: bytes,
    options: Sequence[tuple[str, object]],
    timeout_s: float = 5.0,
) -> grpc.aio.Channel:
    """Open a channel to ``HOST:PORT`` that trusts only the certificate with this SHA-256 fingerprint.

    Raises:
        PeerUnavailable: no server answers there within ``timeout_s``.
        BadReply: another server answers there.
    """
    der = await credentials.certificate_at(address, timeout_s)
    if hashlib.sha256(der).digest() != fingerprint:
        raise BadReply(
            f"the server at {printable(address, _SHOWN_CHARS)} shows another TLS certificate than its record promises"
        )
    channel_credentials = credentials.for_server(ssl.DER_cert_to_PEM_cert(der).encode())
    return grpc.aio.secure_channel(
        address, channel_credentials, options=[*options, ("grpc.ssl_target_name_override", _TLS_NAME)]
    )


def peer_of(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Return the peer id of a client, given the ``auth_context`` of its call.

    Raises:
        AccessDenied: the client has shown no certificate or a very long one, or its key cannot be a peer's.
    """
    certificate_pem = next(iter(auth_context.get("x509_pem_cert", ())), None)
    if certificate_pem is None:
        raise AccessDenied("the client has shown no certificate")
    if len(certificate_pem) > _MAX_PEM_BYTES:  # strangers' certificates would fill the memory of what is cached
        raise AccessDenied(
            f"the client's certificate has {len(certificate_pem)} bytes: expected at most {_MAX_PEM_BYTES}"
        )
    return _peer_of(certificate_pem)


def token_of(auth_context: Mapping[str, Iterable[bytes]]) -> bytes:
    """Return the membership token in a client's certificate; empty if the client has shown none.

    The token is not verified here. The handshake has already proved that the client has the certificate's key.
    """
    certificate_pem = next(iter(auth_context.get("x509_pem_cert", ())), None)
    return b"" if certificate_pem is None else _token_of(certificate_pem)


@lru_cache(_MOST_KNOWN)
def _token_of(certificate_pem: bytes) -> bytes:
    try:
        found = x509.load_pem_x509_certificate(certificate_pem).extensions.get_extension_for_oid(_TOKEN_OID).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return b""
    return found.value if isinstance(found, x509.UnrecognizedExtension) else b""


@lru_cache(_MOST_KNOWN)
def _peer_of(certificate_pem: bytes) -> str:
    try:
        key = x509.load_pem_x509_certificate(certificate_pem).public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise AccessDenied("the client's certificate cannot be read") from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise AccessDenied("the key in the client's certificate is no peer's: expected an RSA key")
    if key.key_size < MIN_KEY_BITS:
        raise AccessDenied(f"the client's RSA key has {key.key_size} bits: expected at least {MIN_KEY_BITS}")
    return peer_id_of_key(key)


@cache
def _authority() -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Return the authority's private key, which is not secret, and its certificate, PEM."""
    key = ec.derive_private_key(int.from_bytes(_AUTHORITY_SECRET), ec.SECP256R1())
    return key, _certificate_pem(_AUTHORITY_NAME, key.public_key(), _AUTHORITY_NAME, key)


def _key_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate_pem(
    name: str,
    key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    token: bytes = b"",
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # the clocks of volunteers differ
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_TLS_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)  # ca: a root
    )
    if token:
        builder = builder.add_extension(x509.UnrecognizedExtension(_TOKEN_OID, token), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
