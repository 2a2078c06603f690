"""Who a peer is: its key file, and its peer id."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.proto import crypto_pb2

from swarm_protocol.net import identity as identity_module
from swarm_protocol.net.identity import MIN_KEY_BITS, Identity, peer_id_of, verified_signer

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

    def test_two_servers_of_one_process_cannot_share_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity_module, "_LOCK_WAIT_S", 0.1)
        first = Identity.load_or_create(tmp_path / "key")
        with pytest.raises(ValueError, match="in use by another process of this machine"):
            Identity.load_or_create(tmp_path / "key")
        assert first.peer_id

    def test_two_processes_cannot_share_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity_module, "_LOCK_WAIT_S", 0.1)
        path = tmp_path / "key"
        peer_id = Identity.load_or_create(path).peer_id
        command = [sys.executable, "-c", LOCK_IN_ANOTHER_PROCESS, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout.readline() == b"locked\n"
            with pytest.raises(ValueError, match="in use by another process"):
                Identity.load_or_create(path)
        identity = Identity.load_or_create(path)
        assert identity.peer_id == peer_id
        with path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_one_that_a_process_is_about_to_let_go_of_is_waited_for(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        first = Identity.load_or_create(path)
        release = threading.Timer(0.2, first.lock.close)
        release.start()
        assert Identity.load_or_create(path).peer_id == first.peer_id
        release.join()

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

    def test_a_short_key_is_refused(self, tmp_path: Path) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=MIN_KEY_BITS // 2).private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        path = tmp_path / "short"
        path.write_bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=key).SerializeToString())
        with pytest.raises(ValueError, match=f"the key in {path} has 1024 bits: expected at least 2048"):
            Identity.load_or_create(path)

    def test_a_path_that_cannot_be_a_key_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=f"directory {tmp_path / 'missing'} does not exist"):
            Identity.load_or_create(tmp_path / "missing" / "key")
        with pytest.raises(ValueError, match="is a directory, expected a key file"):
            Identity.load_or_create(tmp_path)

    @pytest.mark.parametrize("where", ["in memory", "on disk"])
    def test_the_copy_for_the_daemon_is_private_and_short_lived(
        self, where: str, identity: Identity, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if where == "on disk":  # as on macOS
            monkeypatch.delattr(os, "memfd_create", raising=False)
        with identity.as_file() as name:
            assert PeerID.from_identity(Path(name).read_bytes()).to_base58() == identity.peer_id
            assert stat.S_IMODE(Path(name).stat().st_mode) == 0o600
        assert not Path(name).exists()


class TestPeerId:
    def test_follows_from_the_public_key(self, identity: Identity) -> None:
        assert peer_id_of(identity.public_key) == identity.peer_id
        assert peer_id_of(Identity.generate().public_key) != identity.peer_id

    def test_other_keys_are_refused(self) -> None:
        other = ed25519.Ed25519PrivateKey.generate().public_key()
        for key in (
            b"",
            b"ssh-rsa AAAA",
            other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH),
        ):
            with pytest.raises(ValueError, match=r"^the key is no RSA key: expected one in OpenSSH's format$"):
                peer_id_of(key)


def test_the_signer_of_data_is_the_peer_whose_key_has_signed_it(identity: Identity) -> None:
    signature, key = identity.private_key.sign(b"purpose: data"), identity.public_key
    assert verified_signer(b"purpose: data", key, signature) == identity.peer_id
    for data, public_key, texts, expected in (
        (b"another: data", key, {"no_key": "no"}, f"a signature of {identity.peer_id} is wrong"),
        (b"purpose: data", Identity.generate().public_key, {"wrong": "it is wrong"}, "it is wrong"),
        (b"purpose: data", b"", {"wrong": "it is wrong", "no_key": "no key of a peer"}, "no key of a peer"),
    ):
        with pytest.raises(ValueError, match=expected):
            verified_signer(data, public_key, signature, **texts)
