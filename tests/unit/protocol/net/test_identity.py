"""Who a peer is: its key file, its peer id, and the TLS certificate that its record vouches for."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.proto import crypto_pb2

from swarm_protocol.errors import BadReply, PeerUnavailable
from swarm_protocol.net.identity import Certificate, Identity, peer_id_of, pinned_channel
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.pb.swarm_pb2_grpc import BlocksServicer, BlocksStub, add_BlocksServicer_to_server
from swarm_protocol.wire.constants import CLIENT_OPTIONS, SERVER_OPTIONS
from tests.unit.support import run

LOCK_IN_ANOTHER_PROCESS = """
import fcntl, sys
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.generate()


class TestKeyFile:
    def test_peer_id_is_the_one_libp2p_gives_the_key(self, tmp_path: Path) -> None:
        identity = Identity.load_or_create(tmp_path / "key")
        assert identity.peer_id == PeerID.from_identity((tmp_path / "key").read_bytes()).to_base58()

    def test_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        old = os.umask(0)
        try:
            Identity.load_or_create(tmp_path / "key")
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600

    def test_is_the_same_peer_after_a_restart(self, tmp_path: Path) -> None:
        first = Identity.load_or_create(tmp_path / "key")
        content, peer_id = (tmp_path / "key").read_bytes(), first.peer_id
        del first  # the lock goes with it
        assert Identity.load_or_create(tmp_path / "key").peer_id == peer_id
        assert (tmp_path / "key").read_bytes() == content

    def test_two_servers_of_one_process_cannot_share_it(self, tmp_path: Path) -> None:
        first = Identity.load_or_create(tmp_path / "key")
        with pytest.raises(ValueError, match="in use by another server of this machine"):
            Identity.load_or_create(tmp_path / "key")
        assert first.peer_id

    def test_two_processes_cannot_share_it(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        peer_id = Identity.load_or_create(path).peer_id
        command = [sys.executable, "-c", LOCK_IN_ANOTHER_PROCESS, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout.readline() == b"locked\n"
            with pytest.raises(ValueError, match="in use by another server"):
                Identity.load_or_create(path)
        identity = Identity.load_or_create(path)
        assert identity.peer_id == peer_id
        with path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_file_of_something_else_is_refused_and_kept(self, identity: Identity, tmp_path: Path) -> None:
        with identity.as_file() as name:
            key = Path(name).read_bytes()
        rsa = crypto_pb2.PrivateKey.FromString(key).data
        other = ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        contents = {
            "empty": b"",
            "text": b"hello\n",
            "zeros": bytes(1000),
            "truncated": key[:-5],
            "without its envelope": rsa,
            "another algorithm": crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=other).SerializeToString(),
            "mislabelled": crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=rsa).SerializeToString(),
        }
        for name, content in contents.items():
            path = tmp_path / name
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{path} is no identity file: expected a libp2p RSA private key"):
                Identity.load_or_create(path)
            assert path.read_bytes() == content

    def test_a_path_that_cannot_be_a_key_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=f"directory {tmp_path / 'missing'} does not exist"):
            Identity.load_or_create(tmp_path / "missing" / "key")
        with pytest.raises(ValueError, match="is a directory, expected a key file"):
            Identity.load_or_create(tmp_path)

    def test_the_copy_for_the_daemon_is_private_and_short_lived(self, identity: Identity) -> None:
        with identity.as_file() as name:
            assert PeerID.from_identity(Path(name).read_bytes()).to_base58() == identity.peer_id
            assert stat.S_IMODE(Path(name).stat().st_mode) == 0o600
        assert not Path(name).exists()


class TestPeerId:
    def test_follows_from_the_public_key(self, identity: Identity) -> None:
        public_key = identity.private_key.get_public_key().to_bytes()
        assert peer_id_of(public_key) == identity.peer_id
        assert peer_id_of(Identity.generate().private_key.get_public_key().to_bytes()) != identity.peer_id

    def test_other_keys_are_refused(self) -> None:
        other = ed25519.Ed25519PrivateKey.generate().public_key()
        for key in (
            b"",
            b"ssh-rsa AAAA",
            other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH),
        ):
            with pytest.raises(ValueError):
                peer_id_of(key)


class Named(BlocksServicer):
    def __init__(self, name: str) -> None:
        self._name = name

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.ServerRecord:
        return pb.ServerRecord(peer_id=self._name)


@asynccontextmanager
async def tls_server(certificate: Certificate, name: str = "server", port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_BlocksServicer_to_server(Named(name), server)
    bound = server.add_secure_port(f"127.0.0.1:{port}", certificate.server_credentials())
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


class TestPinning:
    def test_the_promised_certificate_is_trusted(self) -> None:
        async def answer() -> str:
            certificate = Certificate.generate()
            async with tls_server(certificate) as port:
                channel = await pinned_channel(f"127.0.0.1:{port}", certificate.fingerprint, CLIENT_OPTIONS)
                async with channel:
                    return (await BlocksStub(channel).Describe(pb.DescribeRequest())).peer_id

        assert run(answer()) == "server"

    def test_another_certificate_is_a_bad_reply(self) -> None:
        async def connect() -> None:
            async with tls_server(Certificate.generate()) as port:
                for fingerprint in (Certificate.generate().fingerprint, b"", bytes(32)):
                    with pytest.raises(BadReply, match="another TLS certificate"):
                        await pinned_channel(f"127.0.0.1:{port}", fingerprint, CLIENT_OPTIONS)

        run(connect())

    def test_an_impostor_who_takes_over_the_port_gets_nothing(self) -> None:
        async def call_after_takeover() -> None:
            certificate = Certificate.generate()
            async with tls_server(certificate) as port:
                channel = await pinned_channel(f"127.0.0.1:{port}", certificate.fingerprint, CLIENT_OPTIONS)
            async with channel, tls_server(Certificate.generate(), "impostor", port) as taken:
                assert taken == port
                await BlocksStub(channel).Describe(pb.DescribeRequest())

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            run(call_after_takeover())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    def test_nobody_there(self) -> None:
        async def connect() -> None:
            async with tls_server(Certificate.generate()) as port:
                pass
            await pinned_channel(f"127.0.0.1:{port}", bytes(32), CLIENT_OPTIONS)

        with pytest.raises(PeerUnavailable, match=r"no server answers at 127\.0\.0\.1"):
            run(connect())

    @pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    def test_somebody_who_does_not_speak_tls(self, greeting: bytes) -> None:
        async def connect() -> None:
            def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(greeting)  # or stays silent

            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                await pinned_channel(f"127.0.0.1:{port}", bytes(32), CLIENT_OPTIONS, timeout_s=0.2)

        with pytest.raises(PeerUnavailable):
            run(connect())

    @pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "127.0.0.1:70000", "x" * 70 + ".org:1", "\0:1"])
    def test_what_is_no_address_is_an_unavailable_peer(self, address: str) -> None:
        with pytest.raises(PeerUnavailable, match=r"no server answers at .*: it is no address, expected HOST:PORT"):
            run(pinned_channel(address, bytes(32), CLIENT_OPTIONS))
