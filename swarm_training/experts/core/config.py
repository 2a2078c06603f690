"""The configurations and their defaults, which the command line uses too."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from swarm_training.experts.core.cells import Cell, check_grid, check_name, is_in, num_cells

WIRE_VERSION = 2
MAX_HIDDEN = 1 << 16
MAX_CALL_BYTES = 768 * 1024  # of one encoded tensor: a message has room for two, since a backward pass sends two
FLOAT_BYTES = 4
MAX_KEEPERS = 8  # of one expert's replicas


def max_rows(hidden: int) -> int:
    """Return the maximum number of rows in one call."""
    return max(1, MAX_CALL_BYTES // (hidden * FLOAT_BYTES))


@dataclass(frozen=True)
class MixtureConfig:
    """The client's configuration of a mixture.

    Raises ValueError if a value is out of range.

    Attributes:
        k_min: the least number of experts that must answer each row; fewer are an error after other experts were tried.
        beam: the number of prefixes with which the search continues; it is at least k.
        timeout_s: the time after which experts that have not answered a forward pass are left out.
        backward_timeout_s: the same time for backward passes.
        refresh_s: the greatest age of data read from the DHT.
        ban_s: the time for which a server that failed is not called; longer each time it fails again.
    """

    k_min: int = 1
    beam: int = 16
    timeout_s: float = 5.0
    backward_timeout_s: float = 10.0
    refresh_s: float = 5.0
    ban_s: float = 5.0

    def __post_init__(self) -> None:
        if min(self.k_min, self.beam) < 1:
            raise ValueError(f"k_min is {self.k_min} and beam {self.beam}: expected at least 1")
        if not min(self.timeout_s, self.backward_timeout_s, self.refresh_s, self.ban_s) > 0:
            raise ValueError("timeout_s, backward_timeout_s, refresh_s and ban_s: expected seconds above 0")


@dataclass(frozen=True)
class ExpertServerConfig:
    """The configuration of a server of experts.

    Raises ValueError if a value is out of range.

    Attributes:
        kind: the kind of expert, see ``swarm_training.experts.server.registry``.
        learning_rate: the learning rate of Adam; 0 means that experts are not trained.
        max_grad_norm: the norm to which the gradients of a batch are clipped.
        window_s: the time that a request waits for other requests to the same expert.
        max_batch_rows: the most rows of requests that are computed together.
        max_queued_rows: the most rows in the queue; requests beyond are refused, and one caller may have half of it.
        lifetime_s: the lifetime of records in the DHT, which are renewed three times in it.
        host: the address at which the service listens on ``port``, and the DHT node on ``dht_port``; 0: any free port.
        announce_host: the address that others use, if it is not ``host``; both ports must be given then.
        directory: the directory where experts are saved, and from which they are loaded at the start.
        cells: the cells that this server takes when nobody has them, ``num_experts`` in number; empty: any free cells.
        replicas: the number of other servers that keep the state of each expert.
        replica_bytes: the memory for replicas of other servers' experts; 0 means that none are kept.
        adopt: the number of experts to take over whose server has been gone for ``adopt_after_s``; only experts whose
            replicas this server keeps are taken.
    """

    name: str
    hidden: int
    grid: tuple[int, ...] = (32, 32)
    num_experts: int = 16
    kind: str = "feedforward"
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    window_s: float = 0.002
    max_batch_rows: int = 4096
    max_queued_rows: int = 1 << 16
    lifetime_s: float = 30.0
    host: str = "127.0.0.1"
    port: int = 0
    dht_port: int = 0
    announce_host: str | None = None
    initial_peers: tuple[str, ...] = ()
    directory: Path | None = None
    save_every_s: float = 60.0
    cells: tuple[Cell, ...] = ()
    replicas: int = 2
    replicate_every_s: float = 60.0
    replica_bytes: int = 256 << 20
    adopt: int = 0
    adopt_after_s: float = 120.0

    def __post_init__(self) -> None:
        check_name(self.name)
        check_grid(self.grid)
        self._require(1 <= self.hidden <= MAX_HIDDEN, "hidden", f"1 to {MAX_HIDDEN}")
        if not 1 <= self.num_experts <= (most := num_cells(self.grid)):
            raise ValueError(f"{self.num_experts} experts: expected 1 to {most}, the number of cells of the grid")
        self._require(0 <= self.learning_rate < inf, "learning_rate", "a number of at least 0")
        self._require(self.max_grad_norm > 0, "max_grad_norm", "a number above 0")
        self._require(self.max_batch_rows >= 1, "max_batch_rows", "at least 1")
        self._require(self.max_queued_rows >= 1, "max_queued_rows", "at least 1")
        self._require(0 < self.lifetime_s <= 120, "lifetime_s", "seconds above 0, up to 120")
        self._require(0 <= self.window_s < self.lifetime_s, "window_s", f"0 to less than {self.lifetime_s}")
        for name in ("save_every_s", "replicate_every_s", "adopt_after_s"):
            self._require(getattr(self, name) > 0, name, "seconds above 0")
        self._require(0 <= self.replicas <= MAX_KEEPERS, "replicas", f"0 to {MAX_KEEPERS}")
        self._require(self.replica_bytes >= 0, "replica_bytes", "at least 0")
        self._require(self.adopt >= 0, "adopt", "at least 0")
        self._check_network()
        self._check_cells()

    def _require(self, is_valid: bool, name: str, expected: str) -> None:
        """Raise ValueError unless the setting of this name is valid; ``expected`` says which values are."""
        if not is_valid:
            raise ValueError(f"{name} is {getattr(self, name)}: expected {expected}")

    def _check_network(self) -> None:
        for name in ("port", "dht_port"):
            self._require(0 <= getattr(self, name) < 1 << 16, name, "0 to 65535")
        if self.announce_host is not None and not (self.port and self.dht_port):
            raise ValueError("an address is announced: expected ports that are not 0, for the service and for the DHT")
        if self.announce_host is None and self.host.strip("[]") in ("0.0.0.0", "::"):
            raise ValueError(f"nobody can call {self.host}: expected an address to be announced as well")

    def _check_cells(self) -> None:
        if not all(is_in(cell, self.grid) for cell in self.cells) or len(set(self.cells)) != len(self.cells):
            raise ValueError(f"cells are {self.cells}: expected different ones of the grid {self.grid}")
        if self.cells and len(self.cells) != self.num_experts:
            raise ValueError(f"{len(self.cells)} cells for {self.num_experts} experts: expected as many")
