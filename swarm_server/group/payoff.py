"""Whether a group between machines pays: the time of a block in the group beside the time without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarm_models.kernels.int4_linear import KernelInt4Weight, groups_of
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.quantization import Packed
from swarm_server.group.links import GroupEnded, MemberLink, MemberRequest
from swarm_server.group.split_weight import SPEED
from swarm_server.machine.memory import available_bytes

QUANTS = ("int8", "int4")  # of groups; a request for the speed has the index
EXCHANGES = 4  # of a block, see docs/how-to/group.md
_ROWS, _WIDTH = 12288, 8192  # of the weight that is measured: larger than the caches of a processor
_MEASURE_S = 0.3
_WARM_UP, _TURNS = 10, 50


@dataclass(frozen=True)
class Payoff:
    """The measurements that decide whether a group pays, and with which followers.

    Attributes:
        rtt_s: for each follower, the time of a message of one number there and back.
        exchange_s: for each follower, the time of an exchange of a product's inputs and outputs.
        bytes_per_s: how many bytes of weights each member reads per second, the leader first.
        free_bytes: the memory that each member has free, the leader first.
    """

    block_bytes: float
    rtt_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    free_bytes: tuple[float, ...]

    @property
    def block_s(self) -> float:
        """Return the time of a block in the group, whose members read their rows in proportion to their speed."""
        return self.block_bytes / sum(self.bytes_per_s) + EXCHANGES * sum(self.exchange_s)

    @property
    def gain(self) -> float:
        """Return the speed of one session in the group, relative to the faster way without a group.

        The ways without a group are a chain of the members, and the leader alone.
        """
        times_s = [self.block_bytes / each for each in self.bytes_per_s]
        return min(sum(times_s) / len(times_s), times_s[0]) / self.block_s

    def of(self, followers: Sequence[int]) -> Payoff:
        """Return the measurements of the group with only these followers; the first follower is number 0."""
        members = [0, *(follower + 1 for follower in followers)]
        return replace(
            self,
            rtt_s=tuple(self.rtt_s[index] for index in followers),
            exchange_s=tuple(self.exchange_s[index] for index in followers),
            bytes_per_s=tuple(self.bytes_per_s[index] for index in members),
            free_bytes=tuple(self.free_bytes[index] for index in members),
        )

    def best_followers(self, most: int) -> list[int]:
        """Return at most so many followers with which a block takes least time; none if the leader alone is fastest."""
        best_first = sorted(range(len(self.rtt_s)), key=lambda follower: self.of([follower]).block_s)
        # The best followers alone are taken for the best ones together: all combinations would be too many.
        choices = [sorted(best_first[:count]) for count in range(most + 1)]
        return min(choices, key=lambda chosen: self.of(chosen).block_s)

    def __str__(self) -> str:
        rates = " and ".join(f"{each / 1e9:.1f}" for each in self.bytes_per_s)
        return (
            f"{self.gain:.2f} × one session's speed without a group, by computation "
            f"(RTT {max(self.rtt_s, default=0.0) * 1e3:.2f} ms; "
            f"{EXCHANGES} exchanges of {sum(self.exchange_s) * 1e3:.2f} ms for each block of "
            f"{self.block_bytes / 1e6:.1f} MB; members read {rates} GB/s)"
        )


def measured(links: Sequence[MemberLink], quant: str, block_bytes: float, hidden_size: int) -> Payoff:
    """Measure the links and all members.

    Raises:
        GroupEnded: a follower has ended.
    """
    number = QUANTS.index(quant)
    members = [measured_here(number)]
    for link in links:  # one after the other, because members on one machine share its memory
        with link.blamed("measure its speed"):
            link.ask(MemberRequest(SPEED, number=number))
            theirs = torch.empty(2, dtype=torch.float64)
            link.receive(theirs)
            if not float(theirs.min()) > 0:
                raise GroupEnded("it reads nothing per second, or has no memory")
        members.append((float(theirs[0]), float(theirs[1])))
    speeds, free_bytes = zip(*members, strict=True)
    rtts_s = tuple(_typical_s(link, 1) for link in links)
    # Inputs and outputs of a product are between the hidden size and that of the MLP.
    exchanges_s = tuple(_typical_s(link, 2 * hidden_size) for link in links)
    return Payoff(block_bytes, rtts_s, exchanges_s, speeds, free_bytes)


def measured_here(number: int) -> tuple[float, float]:
    """Return how many bytes of weights this process reads per second, and how many bytes of memory are free."""
    return reading_bytes_per_s(number), float(available_bytes(torch.device("cpu")))


def _typical_s(link: MemberLink, numbers: int) -> float:
    with link.blamed("exchange numbers"):
        times_s = [link.exchange_s(numbers) for _ in range(_WARM_UP + _TURNS)]
    return statistics.median(times_s[_WARM_UP:])


def reading_bytes_per_s(number: int) -> float:
    """Measure how many bytes of weights this process reads per second in products of one row, with all its threads."""
    weight, x = _some_weight(number), torch.ones(1, _WIDTH)
    best_s, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < _MEASURE_S or best_s == float("inf"):  # the fastest: others may use the CPU
        began = time.perf_counter()
        weight.matmul(x)
        best_s = min(best_s, time.perf_counter() - began)
    return weight.size_bytes / best_s


def _some_weight(number: int) -> Packed:
    if not 0 <= number < len(QUANTS):
        raise GroupEnded(
            f"the leader asked for the speed of a quantisation of number {number}, which is not understood"
        )
    if QUANTS[number] == "int8":
        return KernelWeight(torch.ones(_ROWS, _WIDTH, dtype=torch.int8), torch.ones(_ROWS))
    groups = groups_of(torch.ones(_ROWS, _WIDTH // 32), torch.full((_ROWS, _WIDTH // 32), 8.0))
    return KernelInt4Weight(torch.full((_ROWS, _WIDTH), 9, dtype=torch.uint8), groups)
