"""The forms in which floating-point tensors travel between trainers and stage peers: exactly, or in fewer bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as wire_pb
from swarm_protocol.wire.codec import encode
from swarm_training.stages.pb import stages_pb2 as pb

if TYPE_CHECKING:
    from swarm_protocol.wire.codec import Assembler

FORMS: dict[str, pb.Form] = {"fp32": pb.FP32, "fp64": pb.FP64, "bf16": pb.BF16, "int8": pb.INT8}
_HEADERS: dict[pb.Form, tuple[wire_pb.DType, wire_pb.Codec]] = {
    pb.FP32: (wire_pb.FLOAT32, wire_pb.RAW),
    pb.FP64: (wire_pb.INT64, wire_pb.RAW),
    pb.BF16: (wire_pb.BFLOAT16, wire_pb.RAW),
    pb.INT8: (wire_pb.FLOAT32, wire_pb.INT8_BLOCKS),
}


def encode_as(form: pb.Form, tensor: Tensor) -> tuple[wire_pb.Tensor, list[bytes]]:
    """Return the wire tensor with its first part inside, and the parts that follow it.

    FP64 is exact, and FP32 is exact for tensors that were computed in fp32 or bf16. Token ids are the same in any form.
    """
    if not tensor.is_floating_point():
        return encode(tensor)
    if form == pb.FP64:
        return encode(tensor.detach().double().contiguous().view(torch.int64))
    if form == pb.BF16:
        return encode(tensor.to(torch.bfloat16))
    return encode(tensor.float(), wire_pb.INT8_BLOCKS if form == pb.INT8 else wire_pb.RAW)


def check_form(form: pb.Form) -> None:
    """Check a form. Raises RequestRejected if it is unknown."""
    if form not in _HEADERS:
        raise RequestRejected(f"wire form {form} is unknown: expected one of {sorted(_HEADERS)}")


def check_header(form: pb.Form, wire: wire_pb.Tensor) -> None:
    """Check a tensor's header. Raises RequestRejected if the tensor is not in that form."""
    if (wire.dtype, wire.codec) != _HEADERS[form]:
        raise RequestRejected(
            f"a tensor came with dtype {wire.dtype} and codec {wire.codec}: wire form {form} expects {_HEADERS[form]}"
        )


def decoded(form: pb.Form, assembler: Assembler) -> Tensor:
    """Return the tensor that has arrived, in the shape of its header: float64, bfloat16 or float32."""
    tensor = assembler.tensor()
    return tensor.view(torch.float64) if form == pb.FP64 else tensor
