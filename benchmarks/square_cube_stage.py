"""A stage in the middle of a Llama, with compression-aware layers at its ends; and a peer that computes it over gRPC.

    python benchmarks/square_cube_stage.py ADDRESS

The peer has any stage that is asked for, and answers as stages do: a forward pass keeps nothing, a backward pass
computes it again.
"""

from __future__ import annotations

import sys
import time
from concurrent import futures
from dataclasses import astuple, dataclass
from functools import lru_cache

import grpc
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode, encode
from swarm_training.stages.compress.layers import boundary

METHOD = "/square_cube/Pass"
COMPUTED_S, KIND = "computed-s", "kind"
FORWARD, BACKWARD = "forward", "backward"
MAX_BYTES = 64 << 20
OPTIONS = [("grpc.max_send_message_length", MAX_BYTES), ("grpc.max_receive_message_length", MAX_BYTES)]


@dataclass(frozen=True)
class Shape:
    """A stage: so many blocks, and what stands at its ends (``swarm_training/stages/compress/layers.py``)."""

    hidden_size: int
    num_blocks: int
    layers: str

    def __str__(self) -> str:
        return ",".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Shape:
        hidden_size, num_blocks, layers = text.split(",")
        return cls(int(hidden_size), int(num_blocks), layers)

    @property
    def intermediate_size(self) -> int:
        """8/3 of the hidden size, as in Llama, in whole 64s."""
        return -(-8 * self.hidden_size // 3) // 64 * 64

    def flops(self, length: int) -> float:
        """Of a token in rows of so many, both passes: forward, forward again, and backward twice as much."""
        h = self.hidden_size
        return 4 * 2.0 * self.num_blocks * (4 * h * h + 3 * h * self.intermediate_size + length * h)


class MiddleStage(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_blocks,
            num_attention_heads=max(1, shape.hidden_size // 64),
            vocab_size=8,
        )
        torch.manual_seed(0)
        self.blocks = LlamaModel(config)
        self.blocks.norm = nn.Identity()  # that is the last stage's
        self.blocks.embed_tokens.requires_grad_(False)
        down, _ = boundary(shape.layers, shape.hidden_size, seed=2)
        _, up = boundary(shape.layers, shape.hidden_size, seed=1)
        self.up, self.down = up, down
        self.trained = [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, inputs: Tensor) -> Tensor:
        """[rows, tokens, width] -> the same."""
        return self.down(self.blocks(inputs_embeds=self.up(inputs), use_cache=False).last_hidden_state)

    def backward(self, inputs: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the inputs; those of the weights are computed, and dropped."""
        inputs = inputs.detach().requires_grad_()
        return torch.autograd.grad(self(inputs), [inputs, *self.trained], grad)[0]


@lru_cache(maxsize=4)
def stage_of(shape: Shape) -> MiddleStage:
    return MiddleStage(shape)


def packed(tensor: Tensor, codec: str) -> bytes:
    """A serialised wire tensor: of ``fp32``, ``bf16`` or ``int8``."""
    sent = tensor.bfloat16() if codec == "bf16" else tensor
    wire, parts = encode(sent, pb.INT8_BLOCKS if codec == "int8" else pb.RAW)
    wire.data = b"".join([wire.data, *parts])
    return wire.SerializeToString()


def unpacked(data: bytes) -> Tensor:
    return decode(pb.Tensor.FromString(data), MAX_BYTES).float()


def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
    """Of a backward pass, inputs and gradient come as one tensor, one after the other."""
    asked = {key: str(value) for key, value in context.invocation_metadata()}
    stage, tensor = stage_of(Shape.parse(asked["stage"])), unpacked(data)
    start = time.perf_counter()
    if asked[KIND] == FORWARD:
        with torch.no_grad():
            output = stage(tensor)
    else:
        output = stage.backward(*tensor.chunk(2))
    context.set_trailing_metadata([(COMPUTED_S, str(time.perf_counter() - start))])
    return packed(output, asked["codec"])


def main() -> None:
    torch.set_num_threads(1)
    server = grpc.server(futures.ThreadPoolExecutor(1), options=OPTIONS)
    handler = grpc.method_handlers_generic_handler("square_cube", {"Pass": grpc.unary_unary_rpc_method_handler(answer)})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(sys.argv[1])
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
