"""The client's configuration, in frozen values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

from swarm_client.core.events import OnEvent
from swarm_models.checkpoints.default_model import check_weights
from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.codecs.sizes import LADDER
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.dht.lan_discovery import require_zeroconf
from swarm_protocol.process.local_registry import DEFAULT_SWARM

COMPRESSIONS = ("auto", *LADDER)
CHECK_SHARE = 0.025  # the share of servers' work; below 3 %, this leaves room for disputes and new servers


@dataclass(frozen=True)
class Timeouts:
    """The time limits of exchanges with a server or the DHT. Construction raises ValueError unless all are numbers of
    seconds."""

    connect_s: float = 4.0
    open_s: float = 5.0  # opening a session, without the wait for room
    close_s: float = 1.0
    probe_after_s: float = 1.0  # after this time without an answer, a server is asked whether it is still there
    probe_s: float = 3.0
    stall_s: float = 5.0  # the least time for a step, however fast it should be, before another server is tried
    trial_s: float = 3.0  # one step of a server that is tried out after another one has stalled
    read_s: float = 10.0  # reading the servers from the DHT
    rejoin_after_s: float = 1.0  # between two attempts to rejoin, which cost little while no peer answers
    check_s: float = 10.0  # the longest time for which a new server's first answers wait to be checked
    rejoin_s: float = 3.0  # waiting for an attempt to rejoin; a longer one continues in the background

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not isinstance(seconds, int | float) or not 0 <= seconds < inf:
                raise ValueError(f"timeouts.{field.name} is {seconds!r}: expected a number of seconds")


@dataclass(frozen=True)
class ClientConfig:
    """The client's configuration. A field that is out of its range raises ValueError at construction.

    Attributes:
        initial_peers: multiaddrs of members of the swarm; by default the swarm registered on this machine.
        discover: also look for members on the local network.
        wait_timeout_s: how long to wait for servers that hold every block before ``NoRoute``, and for room on them
            before ``PeerBusy``.
        step_timeout_s: how long to wait for one server's answer, while the server says that it is still there, and no
            other can replace it.
        recovery_timeout_s: how long a generation or a training step waits for other servers to replace failed ones,
            before ``RecoveryFailed``; 0 makes it fail at once.
        standby: keep a replica of each generation's keys and values on other servers. Then almost nothing is computed
            again when a server fails. The replica costs room on servers and traffic between them.
        on_event: a function that gets each event of a generation or training (``swarm_client.core.events``):
            ``Recovery``, ``Move``, ``Waiting``, ``Retry``, ``WrongAnswers`` or ``DoubtfulTokens``. It runs on the
            network's thread and must not block the thread.
        compression: the format of hidden states and their gradients on the wire: "raw" (or "none"), "bf16", "int8" or
            "int4" (4.5 bits). "auto" is raw where links are fast enough.
        compression_error: the largest relative error of the last hidden state that "auto" may cause.
        head_quant: the format of the head that turns hidden states into logits: "none", or "int8" (on the CPU), which
            is faster, smaller and frozen. A classifier's head stays as it is.
        skip_padding: whether passes without a cache leave out padding, whose hidden states are then zeros.
        draft: the source of guesses for the next tokens. One pass through the servers verifies several guesses, which
            do not change the text. It is "lookup", the name or directory of a small model with the same tokenizer,
            "none", or "auto", which guesses where passes are slow. See ``model.speculation``.
        view_max_age_s: how long the list of servers counts after it was read from the DHT.
        allowed_servers: peer ids, or their ends as ``status`` shows them. If any are given, no others are used.
        blocked_servers: peer ids, or their ends, of servers that are not used.
        weights: the SHA-256 of the manifest of the files to take for ``swarm://NAME``; by default the most common one.
        adapter: the name of an adapter that servers have loaded; only servers that have loaded it are used.
        check_share: the share of the servers' work in generations that is spent on checks: other servers compute the
            same answers, and the client compares them. New servers are checked more; 0 checks nothing. The default is
            0.025, or 0 in the swarm registered on this machine.
        swarm_key: the key of a private swarm; only its members are used as servers. A membership contains the key.
        membership: the file that makes this client a member of a private swarm; by default, the value of the
            environment variable SWARM_MEMBERSHIP.
        identity: the key file of the peer that the membership is for, if the membership came without the key.
    """

    initial_peers: tuple[str, ...] = ()
    discover: bool = False
    swarm: str = DEFAULT_SWARM
    wait_timeout_s: float = 30.0
    step_timeout_s: float = 120.0
    recovery_timeout_s: float = 120.0
    standby: bool = False
    on_event: OnEvent | None = None
    compression: str = "auto"
    compression_error: float = 0.1
    head_quant: str = "none"
    skip_padding: bool = False
    draft: str = "auto"
    view_max_age_s: float = 10.0
    allowed_servers: tuple[str, ...] = ()
    blocked_servers: tuple[str, ...] = ()
    weights: str = ""
    adapter: str = ""
    check_share: float | None = None
    timeouts: Timeouts = Timeouts()
    swarm_key: str = ""
    membership: Path | None = None
    identity: Path | None = None

    def __post_init__(self) -> None:
        self._clean_peers()
        self._check_numerics()
        check_weights(self.weights)
        for name in ("wait_timeout_s", "step_timeout_s", "recovery_timeout_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name} is {seconds!r}: expected a number of seconds")
        self._clean_access()
        share = self.check_share
        if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ValueError(f"check_share is {share!r}: expected a number from 0 (servers are not checked) to 1")
        if not isinstance(self.timeouts, Timeouts):
            raise ValueError(f"timeouts is {self.timeouts!r}: expected Timeouts(connect_s=…, …)")
        if self.on_event is not None and not callable(self.on_event):
            raise ValueError(f"on_event is {self.on_event!r}: expected a function of one event")

    def _clean_peers(self) -> None:
        """Check the addresses and ids of peers, and remove the ellipsis with which ids are displayed."""
        if isinstance(self.initial_peers, str):
            raise ValueError("initial_peers is a string: expected a list of multiaddrs")
        object.__setattr__(self, "initial_peers", tuple(self.initial_peers))
        for peer in self.initial_peers:
            check_peer(peer)
        if self.discover:
            require_zeroconf()
        for name in ("allowed_servers", "blocked_servers"):
            peer_ids = getattr(self, name)
            if isinstance(peer_ids, str):
                raise ValueError(f"{name} is a string: expected a list of peer ids")
            cleaned = tuple(peer_id.lstrip("…") for peer_id in peer_ids)  # `status` writes "…" before an end
            if not all(map(str.isalnum, cleaned)):
                raise ValueError(
                    f"{name} are {list(peer_ids)}: expected peer ids, or their ends as `status` shows them"
                )
            object.__setattr__(self, name, cleaned)

    def _check_numerics(self) -> None:
        """Check the codecs, the head's quantisation and the draft."""
        if self.head_quant not in ("none", "int8"):
            raise ValueError(f"head_quant {self.head_quant!r} is unknown: expected none or int8")
        if self.compression == "none":
            object.__setattr__(self, "compression", "raw")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression {self.compression!r} is unknown: expected {', '.join(COMPRESSIONS)}")
        bound = self.compression_error
        if not isinstance(bound, int | float) or not bound >= 0:
            raise ValueError(f"compression_error is {bound!r}: expected a number of at least 0")
        if not isinstance(self.draft, str) or not self.draft:
            raise ValueError(f"draft is {self.draft!r}: expected auto, none, lookup, or the name of a model")

    def _clean_access(self) -> None:
        """Check what makes this client a member of a private swarm."""
        if self.swarm_key:
            object.__setattr__(self, "swarm_key", str(SwarmKey.parse(str(self.swarm_key))))
        for name in ("membership", "identity"):
            path = getattr(self, name)
            if not isinstance(path, str | Path | None):
                raise ValueError(f"{name} is a {type(path).__name__}: expected the path of a file")
            object.__setattr__(self, name, None if path is None else Path(path))
