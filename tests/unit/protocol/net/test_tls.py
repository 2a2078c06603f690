"""TLS between two peers: the client knows the server by its record's fingerprint, the server the client by its key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from swarm_protocol.errors import AccessDenied, BadReply, PeerUnavailable
from swarm_protocol.net import tls
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import Certificate, ClientCredentials, peer_of, pinned_channel, token_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.wire.constants import CLIENT_OPTIONS, SERVER_OPTIONS
from tests.quick_keys import new_identity
from tests.unit.support import run
from tests.worlds.partial_service import serve_methods


@pytest.fixture(scope="module")
def identities() -> tuple[Identity, Identity]:
    return new_identity(), new_identity()


@pytest.fixture(scope="module")
def credentials(identities: tuple[Identity, Identity]) -> ClientCredentials:
    return ClientCredentials(identities[0])


class Named:
    """Says its own name, and that of its client."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.ServerRecord:
        try:
            who = context.auth_context()
            return pb.ServerRecord(peer_id=self._name, model=peer_of(who), token=token_of(who))
        except AccessDenied as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))


@asynccontextmanager
async def tls_server(certificate: Certificate, name: str = "server", port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    serve_methods(Named(name), server)
    bound = server.add_secure_port(f"127.0.0.1:{port}", certificate.server_credentials())
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


class TestPinning:
    async def test_the_promised_certificate_is_trusted(self, credentials: ClientCredentials) -> None:
        certificate = Certificate.generate()
        async with tls_server(certificate) as port:
            channel = await pinned_channel(credentials, f"127.0.0.1:{port}", certificate.fingerprint, CLIENT_OPTIONS)
            async with channel:
                assert (await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest())).peer_id == "server"

    async def test_another_certificate_is_a_bad_reply(self, credentials: ClientCredentials) -> None:
        async with tls_server(Certificate.generate()) as port:
            for fingerprint in (Certificate.generate().fingerprint, b"", bytes(32)):
                with pytest.raises(BadReply, match="another TLS certificate"):
                    await pinned_channel(credentials, f"127.0.0.1:{port}", fingerprint, CLIENT_OPTIONS)

    def test_nobody_there(self, credentials: ClientCredentials) -> None:
        async def connect() -> None:
            async with tls_server(Certificate.generate()) as port:
                pass
            await pinned_channel(credentials, f"127.0.0.1:{port}", bytes(32), CLIENT_OPTIONS)

        with pytest.raises(PeerUnavailable, match=r"no server answers at 127\.0\.0\.1"):
            run(connect())

    @pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    def test_somebody_who_does_not_speak_tls(self, credentials: ClientCredentials, greeting: bytes) -> None:
        async def connect() -> None:
            def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(greeting)  # or stays silent

            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                await pinned_channel(credentials, f"127.0.0.1:{port}", bytes(32), CLIENT_OPTIONS, timeout_s=0.2)

        with pytest.raises(PeerUnavailable):
            run(connect())

    @pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "127.0.0.1:70000", "x" * 70 + ".org:1", "\0:1"])
    def test_what_is_no_address_is_an_unavailable_peer(self, credentials: ClientCredentials, address: str) -> None:
        with pytest.raises(PeerUnavailable, match=r"no server answers at .*: it is no address, expected HOST:PORT"):
            run(pinned_channel(credentials, address, bytes(32), CLIENT_OPTIONS))


async def described(key_pem: bytes | None, certificate_pem: bytes | None) -> pb.ServerRecord:
    """What a server answers to a client that shows this certificate."""
    certificate = Certificate.generate()
    shown = grpc.ssl_channel_credentials(certificate.certificate_pem, key_pem, certificate_pem)
    options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", "swarm")]
    async with tls_server(certificate) as port, grpc.aio.secure_channel(f"127.0.0.1:{port}", shown, options) as channel:
        return await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest())


def refusal(key_pem: bytes | None, certificate_pem: bytes | None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        run(described(key_pem, certificate_pem))
    return caught.value.code(), caught.value.details()


def signed(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, name: str = "client") -> bytes:
    """A certificate by the authority whose key is public: anybody can have one over any key."""
    authority_key, _ = tls._authority()
    return tls._certificate_pem(name, key.public_key(), tls._AUTHORITY_NAME, authority_key)


def rsa_key(size: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=size)


class TestClients:
    def test_the_server_knows_the_peer_id(self, identities: tuple[Identity, Identity]) -> None:
        async def seen() -> list[str]:
            certificate = Certificate.generate()
            async with tls_server(certificate) as port:
                names = []
                for identity in (*identities, identities[0]):
                    channel = await pinned_channel(
                        ClientCredentials(identity), f"127.0.0.1:{port}", certificate.fingerprint, CLIENT_OPTIONS
                    )
                    async with channel:
                        names.append((await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest())).model)
                return names

        first, second = (identity.peer_id for identity in identities)
        assert run(seen()) == [first, second, first]

    def test_it_follows_from_the_key_whatever_else_the_certificate_says(
        self, identities: tuple[Identity, Identity]
    ) -> None:
        own, other = identities
        answer = run(described(tls._key_pem(own.rsa_key), signed(own.rsa_key, name=other.peer_id)))
        assert answer.model == own.peer_id

    def test_one_without_a_certificate_is_refused(self) -> None:
        assert refusal(None, None)[0] is grpc.StatusCode.UNAVAILABLE

    def test_one_of_another_authority_is_refused(self) -> None:
        key, authority_key = rsa_key(2048), ec.generate_private_key(ec.SECP256R1())
        for issuer, issuer_key in ((tls._AUTHORITY_NAME, authority_key), ("client", key)):
            certificate_pem = tls._certificate_pem("client", key.public_key(), issuer, issuer_key)
            assert refusal(tls._key_pem(key), certificate_pem)[0] is grpc.StatusCode.UNAVAILABLE

    def test_the_certificate_of_somebody_else_is_of_no_use_without_the_key(
        self, identities: tuple[Identity, Identity]
    ) -> None:
        own, other = identities
        assert refusal(tls._key_pem(own.rsa_key), signed(other.rsa_key))[0] is grpc.StatusCode.UNAVAILABLE

    @pytest.mark.parametrize(
        ("key", "reason"),
        [
            (lambda: rsa_key(1024), "the client's RSA key has 1024 bits: expected at least 2048"),
            (lambda: ec.generate_private_key(ec.SECP256R1()), "is no peer's: expected an RSA key"),
        ],
        ids=["short", "another-kind"],
    )
    def test_a_key_that_is_no_peers_is_refused(self, key: Callable[[], Any], reason: str) -> None:
        made = key()
        status, details = refusal(tls._key_pem(made), signed(made))
        assert status is grpc.StatusCode.PERMISSION_DENIED and reason in details

    def test_a_certificate_that_is_much_too_long_is_refused(self, identities: tuple[Identity, Identity]) -> None:
        """gRPC lets certificates of 90 KB through."""
        long = ClientCredentials(identities[0], bytes(90_000))._certificate_pem
        with pytest.raises(AccessDenied, match=r"has \d{6} bytes: expected at most 16384"):
            peer_of({"x509_pem_cert": [long]})

    def test_without_tls_nobody_is_known(self) -> None:
        for context in ({}, {"x509_pem_cert": []}, {"x509_pem_cert": [b"nonsense"]}):
            with pytest.raises(AccessDenied):
                peer_of(context)

    @pytest.mark.parametrize("is_of_authority", [True, False])
    def test_who_takes_over_the_port_of_a_server_gets_nothing(
        self, credentials: ClientCredentials, is_of_authority: bool
    ) -> None:
        """Not even with a certificate of the public authority, which makes clients and not servers."""

        async def call_after_takeover() -> None:
            genuine = Certificate.generate()
            key = ec.generate_private_key(ec.SECP256R1())
            forged = Certificate(tls._key_pem(key), signed(key, name="swarm"))
            forged = forged if is_of_authority else Certificate.generate()
            async with tls_server(genuine) as port:
                channel = await pinned_channel(credentials, f"127.0.0.1:{port}", genuine.fingerprint, CLIENT_OPTIONS)
            async with channel, tls_server(forged, "impostor", port) as taken:
                assert taken == port
                await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest())

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            run(call_after_takeover())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("token", [b"", b"\x00a token", bytes(1024)])
async def test_a_certificate_shows_the_token_of_a_member(identities: tuple[Identity, Identity], token: bytes) -> None:
    certificate = Certificate.generate()
    async with tls_server(certificate) as port:
        credentials = ClientCredentials(identities[1], token)
        channel = await pinned_channel(credentials, f"127.0.0.1:{port}", certificate.fingerprint, CLIENT_OPTIONS)
        async with channel:
            record = await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest())
    assert (record.model, record.token) == (identities[1].peer_id, token)
