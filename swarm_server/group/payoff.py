"""Whether a group between machines pays: the time of a block in the group beside the time without it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from swarm_models.kernels.int4_linear import KernelInt4Weight, groups_of
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.quantization import Packed
from swarm_server.group.links import GroupEnded, LeaderLinks, MemberRequest
from swarm_server.group.split_weight import SPEED

QUANTS = ("int8", "int4")  # of a group, by the number that requests for the speed have
EXCHANGES = 4  # of a block, see docs/how-to/group.md
_ROWS, _WIDTH = 12288, 8192  # of the weight that is measured: larger than the caches of a processor
_MEASURE_S = 0.3
_WARM_UP, _TURNS = 10, 50


@dataclass(frozen=True)
class Payoff:
    """The measurements that decide whether a group pays.

    Attributes:
        block_bytes: bytes of a block's weights.
        rtt_s: the time of a message of one number there and back, to the farthest follower.
        exchange_s: the time of an exchange of a product's inputs and outputs with all followers.
        bytes_per_s: how many bytes of weights each member reads per second, the leader first.
    """

    block_bytes: float
    rtt_s: float
    exchange_s: float
    bytes_per_s: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Return the speed of one session in the group, relative to the faster way without a group.

        The ways without a group are a chain of the members, and the leader alone.
        """
        times_s = [self.block_bytes / each for each in self.bytes_per_s]
        together_s = max(times_s) / len(times_s) + EXCHANGES * self.exchange_s
        return min(sum(times_s) / len(times_s), times_s[0]) / together_s

    def __str__(self) -> str:
        rates = " and ".join(f"{each / 1e9:.1f}" for each in self.bytes_per_s)
        return (
            f"{self.gain:.2f} × one session's speed without a group, by computation (RTT {self.rtt_s * 1e3:.2f} ms; "
            f"{EXCHANGES} exchanges of {self.exchange_s * 1e3:.2f} ms for each block of "
            f"{self.block_bytes / 1e6:.1f} MB; members read {rates} GB/s)"
        )


def measured(links: LeaderLinks, quant: str, block_bytes: float, hidden_size: int) -> Payoff:
    """Measure the links and the speeds of all members.

    Raises:
        GroupEnded: a follower has ended.
    """
    number = QUANTS.index(quant)
    speeds = [reading_bytes_per_s(number)]
    for link in links.links:  # one after the other, because members on one machine share its memory
        link.ask(MemberRequest(SPEED, number=number))
        speed = torch.empty(1, dtype=torch.float64)
        link.receive(speed)
        if not float(speed) > 0:
            raise GroupEnded("a member of the group reads nothing per second")
        speeds.append(float(speed))
    rtts_s = [_typical_s(links, 1, [which]) for which in range(len(links.links))]
    # Inputs and outputs of a product are between the hidden size and that of the MLP.
    exchange_s = _typical_s(links, 2 * hidden_size, range(len(links.links)))
    return Payoff(block_bytes, max(rtts_s), exchange_s, tuple(speeds))


def _typical_s(links: LeaderLinks, numbers: int, which: range | list[int]) -> float:
    times_s = [sum(links.links[index].exchange_s(numbers) for index in which) for _ in range(_WARM_UP + _TURNS)]
    return statistics.median(times_s[_WARM_UP:])


def reading_bytes_per_s(number: int) -> float:
    """Measure how many bytes of weights this process reads per second in products of one row, with all its threads."""
    weight, x = _some_weight(number), torch.ones(1, _WIDTH)
    best_s, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < _MEASURE_S or best_s == float("inf"):
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
