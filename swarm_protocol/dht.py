"""A peer's place in the swarm's DHT: join, publish one's record, read everybody's."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import ExitStack

from swarm_protocol.errors import NoSwarm
from swarm_protocol.hivemind_parts import (
    P2P,
    DHTNode,
    DHTProtocol,
    DHTRecord,
    MSGPackSerializer,
    Multiaddr,
    P2PDaemonError,
    RSASignatureValidator,
    get_dht_time,
)
from swarm_protocol.identity import Identity, peer_id_of
from swarm_protocol.records import LIFETIME_S, ServerRecord, ServerState, SwarmView, models_key, servers_key

JOIN_TIMEOUT_S = 9.0  # an initial peer that does not answer is reported within 10 s
_CONNECT_TIMEOUT_S = 3.0
_DAEMON_TIMEOUT_S = 20.0  # on a machine that has much else to do
# The whole subkey, which leaves no room for a second owner: hivemind asks for the signature of the first it finds.
_SUBKEY = re.compile(r"([1-9A-HJ-NP-Za-km-z]+)\[owner:(ssh-rsa [A-Za-z0-9+/]+=*)\]")
_logger = logging.getLogger(__name__)

# hivemind reports every hiccup of its daemon on stderr; what matters reaches the user through our own errors.
logging.getLogger("hivemind").setLevel(logging.CRITICAL)


class Dht:
    """A DHT node inside this process; its libp2p daemon leaves with the process."""

    def __init__(self, p2p: P2P, node: DHTNode, swarm: str, identity: Identity) -> None:
        self._p2p = p2p
        self._node = node
        self._swarm = swarm
        self._identity = identity
        self._subkey = f"{identity.peer_id}[owner:{identity.private_key.get_public_key().to_bytes().decode()}]"
        self._expiration = 0.0

    @classmethod
    async def join(
        cls,
        swarm: str,
        initial_peers: Sequence[str],
        identity: Identity,
        *,
        host: str | None = None,
        port: int = 0,
        announce_host: str | None = None,
    ) -> Dht:
        """Joins through ``initial_peers``, or starts a new DHT if there are none.

        A node that listens (``host`` is given) stores records for others; without ``host`` it only asks.
        ``announce_host`` is the address others should use, with ``port``, which must then not be 0.

        Raises:
            NoSwarm: no initial peer answered (after at most 10 s).
            ValueError: an initial peer is no multiaddr with a peer id.
        """
        if initial_peers:
            await _require_answer(initial_peers)
        listening = (
            {"host_maddrs": [multiaddr(host, port)]}
            if host is not None
            else {"no_listen": True, "host_maddrs": None, "dht_mode": "client"}
        )
        if announce_host is not None:
            listening["announce_maddrs"] = [multiaddr(announce_host, port)]
        with ExitStack() as stack:
            try:
                p2p = await P2P.create(
                    initial_peers=list(initial_peers),
                    identity_path=stack.enter_context(identity.as_file()),
                    check_if_identity_free=False,  # starts another daemon to find out; our key files are locked
                    startup_timeout=_DAEMON_TIMEOUT_S,
                    auto_nat=False,
                    nat_port_map=False,
                    use_relay=False,
                    **listening,
                )
            except P2PDaemonError as error:
                if initial_peers:
                    raise NoSwarm(f"no initial peer answered: {_names(initial_peers)}") from None
                raise NoSwarm(f"the libp2p daemon did not start: {error}") from None
        try:
            node = await asyncio.wait_for(
                DHTNode.create(
                    p2p=p2p,
                    initial_peers=list(initial_peers),
                    client_mode=host is None,
                    record_validator=_Validator(identity.private_key),
                    cache_refresh_before_expiry=0,
                ),
                JOIN_TIMEOUT_S - _CONNECT_TIMEOUT_S,
            )
        except (RuntimeError, asyncio.TimeoutError):
            await p2p.shutdown()
            raise NoSwarm(f"no initial peer answered: {_names(initial_peers)}") from None
        except BaseException:
            await p2p.shutdown()
            raise
        return cls(p2p, node, swarm, identity)

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    async def addresses(self) -> list[str]:
        """Multiaddrs under which others can join through this node."""
        return [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]

    async def publish(self, record: ServerRecord, lifetime_s: float = LIFETIME_S) -> bool:
        """Stores the record, signed with the node's identity; returns whether some node took it."""
        assert record.peer_id == self.peer_id
        self._expiration = max(get_dht_time() + lifetime_s, self._expiration + 0.001)  # a later expiration replaces
        stored, _ = await asyncio.gather(
            self._node.store(
                servers_key(self._swarm, record.model),
                record.to_proto().SerializeToString(),
                self._expiration,
                subkey=self._subkey,
            ),
            self._node.store(models_key(self._swarm), record.num_blocks, self._expiration, subkey=record.model),
        )
        return bool(stored)

    async def view(self, model: str, num_blocks: int) -> SwarmView:
        """All servers of a model, withdrawn ones left out. One DHT read, whatever their number."""
        entry = await self._node.get(servers_key(self._swarm, model), latest=True)
        if entry is None or not isinstance(entry.value, dict):
            return SwarmView()
        records = [_checked(subkey, item.value) for subkey, item in entry.value.items()]
        return SwarmView.of(
            record for record in records if record is not None and record.state is not ServerState.OFFLINE
        )

    async def models(self) -> dict[str, int]:
        """Names of the models served in this swarm, with their numbers of blocks."""
        entry = await self._node.get(models_key(self._swarm), latest=True)
        if entry is None or not isinstance(entry.value, dict):
            return {}
        models = {
            name: item.value
            for name, item in entry.value.items()
            if isinstance(name, str) and isinstance(item.value, int) and 0 < item.value < 10_000
        }
        return dict(sorted(models.items()))

    async def shutdown(self) -> None:
        if self._node.cache_refresh_task is not None:
            self._node.cache_refresh_task.cancel()  # hivemind forgets it
        await self._node.shutdown()
        await self._p2p.shutdown()


def multiaddr(host: str, port: int) -> str:
    """The TCP multiaddr of a host name or IP address."""
    if re.fullmatch(r"[\d.]+", host):
        return f"/ip4/{host}/tcp/{port}"
    return f"/ip6/{host.strip('[]')}/tcp/{port}" if ":" in host else f"/dns4/{host}/tcp/{port}"


class _Validator(RSASignatureValidator):
    """Refuses records that their owner has not signed, and those that would spoil a key for all its readers."""

    def validate(self, record: DHTRecord) -> bool:
        if record.subkey == DHTProtocol.IS_REGULAR_VALUE:
            return False  # it would replace everybody's
        try:
            if not super().validate(record):
                return False
            MSGPackSerializer.loads(self.strip_value(record))  # what cannot be unpacked makes hivemind's search hang
        except Exception:  # whatever a stranger's bytes provoke
            return False
        return True


def _checked(subkey: object, value: object) -> ServerRecord | None:
    """The record, if it is well formed and its owner is the peer it speaks of (the DHT has checked the signature)."""
    try:
        owner = _SUBKEY.fullmatch(subkey)
        record = ServerRecord.parse(value)
        if owner is None or not owner[1] == record.peer_id == peer_id_of(owner[2].encode()):
            raise ValueError("its owner is somebody else")
    except (ValueError, TypeError) as error:
        _logger.debug("ignored a record under %s: %s", subkey, error)
        return None
    return record


async def _require_answer(initial_peers: Sequence[str]) -> None:
    """Tries a plain TCP connection to every peer: a dead address is found at once, and said clearly."""
    targets = [_tcp_target(peer) for peer in initial_peers]
    attempts = [_connects(*target) for target in targets if target is not None]
    if attempts and len(attempts) == len(targets) and not any(await asyncio.gather(*attempts)):
        raise NoSwarm(f"no initial peer answered: {_names(initial_peers)}")


def _tcp_target(peer: str) -> tuple[str, int] | None:
    """Host and port of a TCP multiaddr; None for other transports, which only libp2p can try."""
    try:
        Multiaddr(peer)
        if not re.search(r"/p2p/[^/]+$", peer):
            raise ValueError("no peer id")
    except ValueError:
        raise ValueError(
            f"initial peer {peer!r} is no multiaddr of a peer: expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, "
            "as a server prints it after `peer=`"
        ) from None
    match = re.match(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)/p2p/[^/]+$", peer)
    return (match[1], int(match[2])) if match else None


async def _connects(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_TIMEOUT_S)
    except (OSError, UnicodeError, asyncio.TimeoutError):  # UnicodeError: no possible host name
        return False
    writer.close()
    return True


def _names(initial_peers: Sequence[str]) -> str:
    return ", ".join(initial_peers)
