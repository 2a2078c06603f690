"""Rounding of the linear layers of one block, each by the inputs that it gets in the block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from swarm_models.checkpoints.formats.compressed_tensors import four_bit_parts, int8_parts
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_models.kernels.int4_linear import GROUP, scales_and_zeros
from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.quantization import TRANSPOSED, linear_names
from swarm_models.quantization.compensation import InputMoments, quantize_compensated
from swarm_models.quantization.stored import stored_int4
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_server.blocks.blocks import BlockStack


class _AllRecorded(Exception):
    """A signal that a layer begins whose input is not the recorded one, so that the rest need not be computed."""


class RoundedBlock:
    """A block whose linear layers are rounded in the order in which they compute.

    Layers are left as they are if the checkpoint does not store their weight as the matrix that the layer has, or if
    their inputs are not a multiple of 32.

    Attributes:
        rounded: the tensors to store for each rounded layer, by the name of the weight in the checkpoint and the ends
            of the tensors' names.
    """

    def __init__(self, stack: BlockStack, stored: Mapping[str, StoredTensor], eight_bits: Container[str]) -> None:
        """Take a stack of one block, its tensors in the checkpoint by name, and the layers to hold in 8 bits.

        Raises UnsupportedModel if the checkpoint stores a layer in 4 bits already.
        """
        self.rounded: dict[str, dict[str, torch.Tensor]] = {}
        self._stack, self._eight_bits = stack, eight_bits
        (index,) = stack.span
        self._block = stack.original(index)
        names = {stack.family.name_in_block(name): name for name in stored}
        layers = [layer for layer in linear_names(self._block) if f"{layer}.weight" in names]
        weights = {layer: names[f"{layer}.weight"] for layer in layers}
        for name in weights.values():
            if stored_int4(stored[name]) is not None:
                raise UnsupportedModel(
                    f"{name} is in 4 bits already, and servers with --quant int4 take these as they are: "
                    "expected a checkpoint in more bits"
                )
        self._weights = {layer: name for layer, name in weights.items() if self._is_plain(layer, stored[name])}

    def round(self, hidden: torch.Tensor) -> torch.Tensor:
        """Round the layers, and return what the rounded block computes. hidden: [n, tokens, hidden_size]."""
        left = dict(self._weights)
        while left:
            # Once more for each input, because the layers that are rounded already change it.
            moments = self._moments(left, hidden)
            if not moments:  # no token has reached the remaining layers
                break
            for layer, its_moments in moments.items():
                self._round_layer(layer, left.pop(layer), its_moments)
        return self._stack(hidden)

    def _is_plain(self, layer: str, stored: StoredTensor) -> bool:
        linear: Any = self._block.get_submodule(layer)
        shape = tuple(linear.weight.shape)
        return not TRANSPOSED[type(linear).__name__] and stored.shape == shape and shape[1] % GROUP == 0

    def _round_layer(self, layer: str, name: str, moments: InputMoments) -> None:
        linear: Any = self._block.get_submodule(layer)
        if layer in self._eight_bits:
            q, scale = quantize_rows(linear.weight)
            self.rounded[name] = int8_parts(q, scale)
            linear.weight.copy_(q * scale[:, None])  # later layers and blocks get what the rounded weights compute
            return
        try:
            q, groups = quantize_compensated(linear.weight, moments)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise CheckpointError(
                f"{name} cannot be rounded: expected finite inputs, and not the same ones for all tokens"
            ) from None
        scale, zero = scales_and_zeros(groups)
        self.rounded[name] = four_bit_parts(q, scale, zero)
        levels = q.unflatten(1, (-1, GROUP)) - zero[..., None]
        linear.weight.copy_((levels * scale[..., None]).flatten(1))

    def _moments(self, layers: Collection[str], hidden: torch.Tensor) -> dict[str, InputMoments]:
        """Return the moments of the first of these layers that computes, and of the next ones with the same input."""
        first: list[torch.Tensor] = []
        found: dict[str, InputMoments] = {}

        def record(layer: str, x: torch.Tensor) -> None:
            if not first:
                first.append(x)
            if first[0] is not x:  # layers such as q, k and v get the same tensor
                raise _AllRecorded
            found[layer] = next(iter(found.values()), None) or InputMoments.of(x)

        with self._recorded(layers, record), suppress(_AllRecorded):
            self._stack(hidden)
        return found

    @contextmanager
    def _recorded(self, layers: Collection[str], record: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        """Call ``record(layer, input)`` with the input of each of these layers while the block computes."""
        hooks = [
            self._block.get_submodule(layer).register_forward_pre_hook(
                lambda _module, args, layer=layer: record(layer, args[0])
            )
            for layer in layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
