from swarm_protocol.pb import swarm_pb2 as _swarm_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExpertsRecord(_message.Message):
    __slots__ = ("wire_version", "hidden", "address", "tls_fingerprint", "next", "token")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    hidden: int
    address: str
    tls_fingerprint: bytes
    next: _containers.RepeatedScalarFieldContainer[int]
    token: bytes
    def __init__(self, wire_version: _Optional[int] = ..., hidden: _Optional[int] = ..., address: _Optional[str] = ..., tls_fingerprint: _Optional[bytes] = ..., next: _Optional[_Iterable[int]] = ..., token: _Optional[bytes] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("name", "cell", "inputs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    cell: _containers.RepeatedScalarFieldContainer[int]
    inputs: _swarm_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., cell: _Optional[_Iterable[int]] = ..., inputs: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ForwardReply(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _swarm_pb2.Tensor
    def __init__(self, outputs: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ...) -> None: ...

class BackwardRequest(_message.Message):
    __slots__ = ("name", "cell", "inputs", "grad_outputs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    GRAD_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    cell: _containers.RepeatedScalarFieldContainer[int]
    inputs: _swarm_pb2.Tensor
    grad_outputs: _swarm_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., cell: _Optional[_Iterable[int]] = ..., inputs: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ..., grad_outputs: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ...) -> None: ...

class BackwardReply(_message.Message):
    __slots__ = ("grad_inputs",)
    GRAD_INPUTS_FIELD_NUMBER: _ClassVar[int]
    grad_inputs: _swarm_pb2.Tensor
    def __init__(self, grad_inputs: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("cell", "num_steps", "size_bytes", "sha256")
    CELL_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    cell: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    size_bytes: int
    sha256: bytes
    def __init__(self, cell: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class KeepReplicaRequest(_message.Message):
    __slots__ = ("name", "replica", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    replica: Replica
    data: bytes
    def __init__(self, name: _Optional[str] = ..., replica: _Optional[_Union[Replica, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class KeepReplicaReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListReplicasReply(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class FetchReplicaRequest(_message.Message):
    __slots__ = ("name", "cell")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    name: str
    cell: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., cell: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchReplicaReply(_message.Message):
    __slots__ = ("replica", "data")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    replica: Replica
    data: bytes
    def __init__(self, replica: _Optional[_Union[Replica, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
