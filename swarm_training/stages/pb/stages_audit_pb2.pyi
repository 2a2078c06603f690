from swarm_training.stages.pb import stages_pb2 as _stages_pb2
from swarm_training.pb import training_ledger_pb2 as _training_ledger_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttestRequest(_message.Message):
    __slots__ = ("micro_batch", "is_backward", "seed", "withdraws")
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    IS_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWS_FIELD_NUMBER: _ClassVar[int]
    micro_batch: _stages_pb2.MicroBatch
    is_backward: bool
    seed: bytes
    withdraws: bool
    def __init__(self, micro_batch: _Optional[_Union[_stages_pb2.MicroBatch, _Mapping]] = ..., is_backward: bool = ..., seed: _Optional[bytes] = ..., withdraws: bool = ...) -> None: ...

class AttestReply(_message.Message):
    __slots__ = ("statement",)
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    statement: _training_ledger_pb2.SignedByPeer
    def __init__(self, statement: _Optional[_Union[_training_ledger_pb2.SignedByPeer, _Mapping]] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("work", "is_backward", "request", "answer", "seed", "sketch")
    WORK_FIELD_NUMBER: _ClassVar[int]
    IS_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    work: _stages_pb2.Work
    is_backward: bool
    request: bytes
    answer: bytes
    seed: bytes
    sketch: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, work: _Optional[_Union[_stages_pb2.Work, _Mapping]] = ..., is_backward: bool = ..., request: _Optional[bytes] = ..., answer: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., sketch: _Optional[_Iterable[float]] = ...) -> None: ...

class AccuseRequest(_message.Message):
    __slots__ = ("statement", "request", "answer")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    statement: _training_ledger_pb2.SignedByPeer
    request: _stages_pb2.ComputeRequest
    answer: _stages_pb2.ComputeReply
    def __init__(self, statement: _Optional[_Union[_training_ledger_pb2.SignedByPeer, _Mapping]] = ..., request: _Optional[_Union[_stages_pb2.ComputeRequest, _Mapping]] = ..., answer: _Optional[_Union[_stages_pb2.ComputeReply, _Mapping]] = ...) -> None: ...

class AccuseReply(_message.Message):
    __slots__ = ("is_upheld",)
    IS_UPHELD_FIELD_NUMBER: _ClassVar[int]
    is_upheld: bool
    def __init__(self, is_upheld: bool = ...) -> None: ...
