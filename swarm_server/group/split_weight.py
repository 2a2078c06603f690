"""A weight whose rows the members of a group hold together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from swarm_models.kernels.quantized_linear import QuantizedLinear, QuantizedWeight
from swarm_models.quantization import Packed
from swarm_server.group.links import Deal, GroupEnded, LeaderLinks, MemberLink, MemberRequest, OwnWeights

GRADIENT, DEQUANTIZE, LOAD, SPEED, FORM, DISMISS = 1, 2, 3, 4, 5, 6  # kinds of requests; 0 is a product
_MOST_ROWS = 256  # of one request: a long training pass takes longer than members wait for an answer


class SplitWeight(QuantizedWeight):
    """A weight [out, in] of which this process, the leader of a group, holds the first rows, and followers the others.

    Products are bit for bit those of the whole weight, because each of their numbers is computed whole by one member.

    Attributes:
        number: the number of the weight in all members.
    """

    def __init__(self, number: int, whole: Packed, links: LeaderLinks) -> None:
        self.shape = whole.shape
        self.number, self.links = number, links
        self.own = whole.part(links.deal.rows_of(self.shape[0], 0))
        self.size_bytes = self.own.size_bytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), self.shape[0], dtype=torch.float32)
        for inputs, outputs in zip(x.contiguous().split(_MOST_ROWS), y.split(_MOST_ROWS), strict=True):
            if len(inputs):  # ``split`` makes one empty part of no rows
                self.links.matmul(self.number, inputs, self.own, outputs)
        return y

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``matmul``, the sum of what each member's rows give: [rows, in] fp32.

        It is rounded otherwise than that of the whole weight: each member writes its gradients in units of its own.
        """
        return torch.cat([self._matmul_grad(part) for part in grad.split(_MOST_ROWS)])

    def _matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        with self.links.exchange():
            for link, rows in self._followers():
                link.ask(MemberRequest(GRADIENT, len(grad), self.number))
                link.send(grad[:, rows].contiguous())
            total = self.own.matmul_grad(grad[:, : self.own.shape[0]].contiguous())
            part = torch.empty_like(total)
            for link, _ in self._followers():
                link.receive(part)
                total += part
        return total

    def dequantize(self) -> torch.Tensor:
        weight = torch.empty(self.shape, dtype=torch.float32)
        weight[: self.own.shape[0]] = self.own.dequantize()
        with self.links.exchange():
            for link, rows in self._followers():
                link.ask(MemberRequest(DEQUANTIZE, 0, self.number))
                link.receive(weight[rows])
        return weight

    def _followers(self) -> Iterator[tuple[MemberLink, slice]]:
        for member, link in enumerate(self.links.links, start=1):
            yield link, self.links.deal.rows_of(self.shape[0], member)


def answer(request: MemberRequest, own: OwnWeights, link: MemberLink) -> None:
    """Answer a leader's request about one weight that is no product."""
    if request.wanted not in (DEQUANTIZE, GRADIENT) or not 0 <= request.number < len(own):
        raise GroupEnded(
            f"the leader asked for something of kind {request.wanted} and weight {request.number}, "
            "which is not understood"
        )
    weight = own.weights[request.number]
    if request.wanted == DEQUANTIZE:
        link.send(weight.dequantize())
        return
    grad = torch.empty(request.rows, weight.shape[0], dtype=torch.float32)
    link.receive(grad)
    link.send(weight.matmul_grad(grad))


class Splitter:
    """Takes apart the weights of linear layers, in the order that numbers them in all members.

    Attributes:
        num_weights: how many weights have been taken apart so far.
    """

    def __init__(self, deal: Deal) -> None:
        self._deal = deal
        self.num_weights = 0
        self._hash = hashlib.sha256()

    def digest(self) -> bytes:
        """Return a digest of all weights so far, equal in all members that have loaded the same weights."""
        return self._hash.digest()

    def split_(self, module: torch.nn.Module) -> None:
        """Replace each linear layer by one with a split weight, unless it has too few rows for all members."""
        for name in [name for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)]:
            layer: Any = module.get_submodule(name)
            if not isinstance(layer.quantized, Packed):
                continue
            last = self._deal.rows_of(layer.out_features, self._deal.members - 1)
            if last.start < last.stop:
                self._hash.update(_described(layer.quantized))
                module.set_submodule(
                    name, QuantizedLinear(self._replaced(self.num_weights, layer.quantized), layer.bias)
                )
                self.num_weights += 1

    def _replaced(self, number: int, weight: Packed) -> QuantizedWeight:
        raise NotImplementedError


def _described(weight: Packed) -> bytes:
    """Return the weight's format and shape, and a sum of its bytes."""
    sums = [int(part.view(torch.uint8)[: part.nbytes // 8 * 8].view(torch.int64).sum()) for part in weight.parts]
    return repr((weight.FORMAT, tuple(weight.shape), sums)).encode()


class LeaderSplitter(Splitter):
    """Puts split weights into the layers, in the leader of a group."""

    def __init__(self, links: LeaderLinks) -> None:
        super().__init__(links.deal)
        self._links = links

    def _replaced(self, number: int, weight: Packed) -> QuantizedWeight:
        return SplitWeight(number, weight, self._links)


class FollowerSplitter(Splitter):
    """Keeps a follower's rows of the weights.

    Attributes:
        weights: the rows, by the weight's number.
    """

    def __init__(self, member: int, deal: Deal) -> None:
        super().__init__(deal)
        self._member = member
        self.weights: list[Packed] = []

    def _replaced(self, number: int, weight: Packed) -> QuantizedWeight:
        self.weights.append(weight.part(self._deal.rows_of(weight.shape[0], self._member)))
        return _Taken(weight.shape)


class _Taken(QuantizedWeight):
    """The place of a weight that a follower keeps elsewhere: blocks of followers never run."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.size_bytes = shape, 0

    def matmul(self, x: torch.Tensor) -> NoReturn:
        raise NotImplementedError

    def matmul_grad(self, grad: torch.Tensor) -> NoReturn:
        raise NotImplementedError

    def dequantize(self) -> NoReturn:
        raise NotImplementedError
