"""Conversion between torch.Tensor and wire Tensor, in parts; input is checked before memory is allocated for it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm_protocol.codecs.elements import pack_bf16, pack_int8, unpack_bf16, unpack_int8
from swarm_protocol.codecs.int4 import pack_int4, unpack_int4
from swarm_protocol.codecs.sizes import CODEC_NAMES, encoded_bytes
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MAX_MASK_BYTES, MAX_POSITION_IDS, MAX_TENSOR_BYTES, PART_BYTES

_TORCH_DTYPES: dict[pb.DType, torch.dtype] = {
    pb.FLOAT32: torch.float32,
    pb.BFLOAT16: torch.bfloat16,
    pb.FLOAT16: torch.float16,
    pb.INT64: torch.int64,
    pb.UINT8: torch.uint8,
    pb.INT32: torch.int32,
}
_NUMPY_DTYPES = {
    dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in _TORCH_DTYPES.values() if dtype != torch.bfloat16
}
_WIRE_DTYPES = {dtype: wire for wire, dtype in _TORCH_DTYPES.items()}
_PACK = {pb.BFLOAT16_ELEMENTS: pack_bf16, pb.INT8_BLOCKS: pack_int8, pb.INT4_BLOCKS: pack_int4}
_UNPACK = {pb.BFLOAT16_ELEMENTS: unpack_bf16, pb.INT8_BLOCKS: unpack_int8, pb.INT4_BLOCKS: unpack_int4}
_OF_ELEMENTS = (pb.RAW, pb.BFLOAT16_ELEMENTS)  # codecs that encode each element alone
_MORE_DECODED = {pb.INT4_BLOCKS: 2}  # memory for decoding a byte, relative to INT8_BLOCKS
MAX_RANK = 4
_SHOWN_DIMS = 8
_MOST_HEADERS = 4096  # kinds of tensors whose headers need not be checked again
_INT32_END = 1 << 31


def torch_dtype(dtype: pb.DType) -> torch.dtype:
    """Return the torch dtype of a wire dtype; raise RequestRejected if it is unknown."""
    if dtype not in _TORCH_DTYPES:
        raise RequestRejected(f"tensor dtype {dtype} is unknown: expected one of {sorted(_TORCH_DTYPES)}")
    return _TORCH_DTYPES[dtype]


def encode(tensor: torch.Tensor, codec: pb.Codec = pb.RAW) -> tuple[pb.Tensor, list[bytes]]:
    """Return the wire tensor with its first part inside, and the parts that follow it.

    All codecs but ``RAW`` are for floating-point tensors. ``INT8_BLOCKS``: absolute-maximum int8 in blocks of 64
    elements (relative error about 0.006 for normally distributed values, 3.8 times smaller than float32).
    ``INT4_BLOCKS``: see ``swarm_protocol/codecs/int4.py`` (0.1, 7.1 times smaller). ``BFLOAT16_ELEMENTS``: 0.0017.

    Raises:
        RequestRejected: the tensor's dtype has no wire form.
    """
    header = pb.Tensor()
    return header, encode_into(header, tensor, codec)


def encode_into(header: pb.Tensor, tensor: torch.Tensor, codec: pb.Codec = pb.RAW) -> list[bytes]:
    """Encode a tensor like ``encode`` into an empty message, and return the parts that follow it."""
    data = _bytes_of(tensor, codec)
    if len(data) <= PART_BYTES:
        _fill(header, tensor, codec, len(data), data)
        return []
    first, *more = parts_of(data)
    _fill(header, tensor, codec, len(data), first)
    return more


def encode_whole(tensor: torch.Tensor) -> pb.Tensor:
    """Encode a tensor like ``encode``, with all its bytes in the one message."""
    data = _bytes_of(tensor, pb.RAW)
    header = pb.Tensor()
    _fill(header, tensor, pb.RAW, len(data), data)
    return header


def _bytes_of(tensor: torch.Tensor, codec: pb.Codec) -> bytes:
    if tensor.dtype not in _WIRE_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _WIRE_DTYPES if dtype.is_floating_point)
        raise RequestRejected(f"tensors of {tensor.dtype} cannot be sent to servers: expected {known}")
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    return _PACK[codec](tensor.contiguous()) if codec in _PACK and tensor.numel() else as_numpy(tensor).tobytes()


def _fill(header: pb.Tensor, tensor: torch.Tensor, codec: pb.Codec, size_bytes: int, data: bytes) -> None:
    """Set all fields, one by one, which takes less than half as long as to create a message of them."""
    header.dtype, header.codec = _WIRE_DTYPES[tensor.dtype], codec
    header.size_bytes, header.data = size_bytes, data
    header.shape.extend(tensor.shape)


class EncodedRows:
    """The rows of a tensor, each encoded like a tensor of one row that fits into one part.

    Attributes:
        header: the wire tensor of each row, without its data.
    """

    def __init__(self, tensor: torch.Tensor, codec: pb.Codec) -> None:
        """Encode the rows. Raise RequestRejected if the tensor's dtype has no wire form."""
        if codec in _OF_ELEMENTS:
            whole = _bytes_of(tensor, codec)
            size = len(whole) // len(tensor)
            self.data = [whole[start : start + size] for start in range(0, len(whole), size)]
        else:
            self.data = [_bytes_of(row, codec) for row in tensor.split(1)]
        self.header = pb.Tensor()
        _fill(self.header, tensor, codec, len(self.data[0]), b"")
        self.header.shape[0] = 1


def parts_of(data: bytes) -> Iterator[bytes]:
    """Return the parts in which data travel, each of ``PART_BYTES``, but for the last."""
    return (data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES))


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the elements of a tensor on the CPU, in the same memory; bfloat16, which numpy lacks, as int16.

    Unlike torch, numpy does not release the interpreter's lock in calls on few elements.
    """
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite; one sum suffices if it is finite, but a sum can overflow by itself."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


class Assembler:
    """A collector of the parts of one tensor; it allocates memory for received data, not for announced data.

    Raises:
        RequestRejected: at construction if the header is inconsistent or over a limit; there, and in ``add``, if more
            data arrives than announced.
    """

    def __init__(self, wire: pb.Tensor, max_bytes: int = MAX_TENSOR_BYTES, parts: Iterable[bytes] = ()) -> None:
        if len(wire.shape) > MAX_RANK:
            raise RequestRejected(f"tensor shape {shown_shape(wire)} is no shape of at most {MAX_RANK} dimensions")
        self.shape, self.codec, self.size_bytes = tuple(wire.shape[:]), wire.codec, wire.size_bytes
        self.dtype = _checked_dtype(self.shape, wire.dtype, self.codec, self.size_bytes, max_bytes)
        self._data = bytearray()
        self.add(wire.data)
        for part in parts:
            self.add(part)

    @property
    def received_bytes(self) -> int:
        return len(self._data)

    @property
    def complete(self) -> bool:
        return len(self._data) == self.size_bytes

    def add(self, part: bytes) -> None:
        if len(self._data) + len(part) > self.size_bytes:
            raise RequestRejected(f"more than the announced {self.size_bytes} bytes of a tensor arrived")
        self._data += part

    def tensor(self) -> torch.Tensor:
        """Return the decoded tensor, on the CPU, owning its memory."""
        assert self.complete
        return _decoded(self._data, self.shape, self.dtype, self.codec)


def _decoded(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype, codec: pb.Codec) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    if codec != pb.RAW:
        return _UNPACK[codec](data, shape, dtype)
    if dtype == torch.bfloat16:  # numpy has none; a view takes longer than all else here
        return torch.frombuffer(data, dtype=dtype).view(shape)
    return torch.from_numpy(np.ndarray(shape, _NUMPY_DTYPES[dtype], data))


@lru_cache(_MOST_HEADERS)  # nearly all tensors of a session are alike
def _checked_dtype(
    shape: tuple[int, ...], wire_dtype: pb.DType, codec: pb.Codec, size_bytes: int, max_bytes: int
) -> torch.dtype:
    """Return the dtype of a tensor. Raise RequestRejected if its header is inconsistent or over a limit."""
    if any(size < 0 for size in shape):
        raise RequestRejected(f"tensor shape {list(shape)} is no shape of at most {MAX_RANK} dimensions")
    dtype = torch_dtype(wire_dtype)
    if size_bytes > max_bytes:
        raise RequestRejected(f"tensor of {size_bytes} bytes is over the limit of {max_bytes} bytes")
    if size_bytes > max_bytes // _MORE_DECODED.get(codec, 1):
        raise RequestRejected(f"tensor of {size_bytes} bytes is over the limit of {max_bytes} bytes, decoded")
    expected = _encoded_bytes(shape, dtype, codec)
    if size_bytes != expected:
        raise RequestRejected(f"tensor {list(shape)} of {dtype} takes {expected} bytes, not {size_bytes} as announced")
    if 0 in shape and math.prod(filter(None, shape)) > max_bytes:  # torch's strides would overflow
        raise RequestRejected(f"tensor shape {list(shape)} is over the limit of {max_bytes} bytes")
    return dtype


def decode(wire: pb.Tensor, max_bytes: int = MAX_TENSOR_BYTES) -> torch.Tensor:
    """Decode a wire tensor that came in one part; raise RequestRejected if it is inconsistent or incomplete."""
    assembler = Assembler(wire, max_bytes)
    if not assembler.complete:
        raise RequestRejected(f"only {len(wire.data)} of {wire.size_bytes} bytes of a tensor arrived")
    return assembler.tensor()


def decode_rows(wires: Sequence[pb.Tensor]) -> torch.Tensor:
    """Decode tensors of one row into one tensor; their shapes, dtypes and codecs are equal, and their data complete."""
    first = Assembler(wires[0])
    if first.codec not in _OF_ELEMENTS:
        return torch.cat([decode(wire) for wire in wires])
    data = bytearray().join([wire.data for wire in wires])
    return _decoded(data, (len(wires), *first.shape[1:]), first.dtype, first.codec)


def shown_shape(wire: pb.Tensor) -> str:
    """Return the shape for error messages, shortened if the sender gave many dimensions."""
    shown = ", ".join(map(str, wire.shape[:_SHOWN_DIMS]))
    return f"[{shown}, …]" if len(wire.shape) > _SHOWN_DIMS else f"[{shown}]"


def encode_mask(mask: torch.Tensor | None) -> pb.AttentionMask | None:
    """Encode a 2D mask [batch, positions]; a mask of ones is sent empty. Raises RequestRejected if too large."""
    if mask is None:
        return None
    attend = mask.detach().cpu() != 0
    if bool(attend.all()):
        return pb.AttentionMask()
    if attend.numel() > 8 * MAX_MASK_BYTES:
        raise RequestRejected(
            f"an attention mask over {' × '.join(map(str, attend.shape))} positions is too large to be sent: expected "
            f"at most {8 * MAX_MASK_BYTES} in all; use fewer rows, or none that are padded"
        )
    return pb.AttentionMask(values=np.packbits(attend.numpy(), bitorder="little").tobytes())


def decode_mask(wire: pb.AttentionMask, batch_size: int, num_positions: int) -> torch.Tensor:
    """Decode to int64 [batch_size, num_positions]; raise RequestRejected if the size differs."""
    if not wire.values:
        return torch.ones(batch_size, num_positions, dtype=torch.int64)
    num_entries = batch_size * num_positions
    if len(wire.values) != -(-num_entries // 8):
        raise RequestRejected(
            f"attention mask has {len(wire.values)} bytes, but batch size {batch_size} and "
            f"{num_positions} positions need {-(-num_entries // 8)}"
        )
    bits = np.unpackbits(np.frombuffer(wire.values, np.uint8), count=num_entries, bitorder="little")
    return torch.from_numpy(bits).view(batch_size, num_positions).to(torch.int64)


def encode_positions(ids: torch.Tensor | None) -> pb.Tensor | None:
    """Encode position ids [batch or 1, tokens] or [batch or 1, tokens, axes] in one part.

    Raises:
        RequestRejected: they are too many or too large.
    """
    if ids is None:
        return None
    _require_few(ids, "positions")
    if ids.numel() and int(ids.abs().max()) > torch.iinfo(torch.int32).max:
        raise RequestRejected(f"position ids from {int(ids.min())} to {int(ids.max())} are outside any model")
    return encode(ids.to(torch.int32))[0]


def encode_joined(joined: torch.Tensor | None) -> pb.Tensor | None:
    """Encode ``BlockInput.joined`` in one part; raise RequestRejected if it has too many entries for a message."""
    if joined is None:
        return None
    _require_few(joined, "positions with pictures")
    return encode(joined.to(torch.uint8))[0]


def _require_few(tensor: torch.Tensor, what: str) -> None:
    if tensor.numel() > MAX_POSITION_IDS:
        raise RequestRejected(
            f"{' × '.join(map(str, tensor.shape))} {what} are too many to be sent at once: expected at most "
            f"{MAX_POSITION_IDS} in all; use fewer rows or shorter ones"
        )


def counts_on(wire: pb.Tensor, start: int, num_tokens: int) -> bool:
    """Return whether these are position ids of one row for all, which count up from ``start``.

    This is the case for nearly all steps, and the check needs no tensor.
    """
    ids = wire.data
    return (
        len(ids) == wire.size_bytes == 4 * num_tokens
        and wire.codec == pb.RAW
        and wire.dtype == pb.INT32
        and wire.shape[:] == [1, num_tokens]
        and start + num_tokens <= _INT32_END
        and ids == struct.pack(f"<{num_tokens}i", *range(start, start + num_tokens))
    )


def split_rows(tensor: torch.Tensor, max_bytes: int = MAX_TENSOR_BYTES) -> Iterator[torch.Tensor]:
    """Split [batch, …] along the batch into pieces whose encoding stays within ``max_bytes``."""
    row_bytes = max(1, tensor[0].numel() * tensor.element_size())
    return iter(tensor.split(max(1, max_bytes // row_bytes)))


def _encoded_bytes(shape: Sequence[int], dtype: torch.dtype, codec: pb.Codec) -> int:
    if codec not in CODEC_NAMES or (codec != pb.RAW and not dtype.is_floating_point):
        raise RequestRejected(f"codec {codec} for {dtype} is unknown")
    width = shape[-1] if shape else 1
    num_rows = math.prod(shape[:-1]) if width else 0
    return encoded_bytes(CODEC_NAMES[codec], num_rows, width, dtype.itemsize)
