from swarm_protocol.pb import swarm_pb2 as _swarm_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FP32: _ClassVar[Form]
    FP64: _ClassVar[Form]
    BF16: _ClassVar[Form]
    INT8: _ClassVar[Form]
FP32: Form
FP64: Form
BF16: Form
INT8: Form

class MicroBatch(_message.Message):
    __slots__ = ("wire_version", "run", "stage", "rollbacks", "step", "number")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    run: str
    stage: int
    rollbacks: int
    step: int
    number: int
    def __init__(self, wire_version: _Optional[int] = ..., run: _Optional[str] = ..., stage: _Optional[int] = ..., rollbacks: _Optional[int] = ..., step: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ComputeRequest(_message.Message):
    __slots__ = ("work", "inputs", "labels", "grad", "part")
    WORK_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    GRAD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    work: Work
    inputs: _swarm_pb2.Tensor
    labels: _swarm_pb2.Tensor
    grad: _swarm_pb2.Tensor
    part: bytes
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ..., inputs: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ..., labels: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ..., grad: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ..., part: _Optional[bytes] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("micro_batch", "inputs_form", "grad_form", "reply_form", "accumulates", "loss_scale", "wants_grad", "forward_only")
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FORM_FIELD_NUMBER: _ClassVar[int]
    GRAD_FORM_FIELD_NUMBER: _ClassVar[int]
    REPLY_FORM_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATES_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    WANTS_GRAD_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    micro_batch: MicroBatch
    inputs_form: Form
    grad_form: Form
    reply_form: Form
    accumulates: bool
    loss_scale: float
    wants_grad: bool
    forward_only: bool
    def __init__(self, micro_batch: _Optional[_Union[MicroBatch, _Mapping]] = ..., inputs_form: _Optional[_Union[Form, str]] = ..., grad_form: _Optional[_Union[Form, str]] = ..., reply_form: _Optional[_Union[Form, str]] = ..., accumulates: bool = ..., loss_scale: _Optional[float] = ..., wants_grad: bool = ..., forward_only: bool = ...) -> None: ...

class ComputeReply(_message.Message):
    __slots__ = ("tensor", "part", "loss_sum", "num_tokens")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tensor: _swarm_pb2.Tensor
    part: bytes
    loss_sum: float
    num_tokens: int
    def __init__(self, tensor: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ..., part: _Optional[bytes] = ..., loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("micro_batch", "is_not_finite", "ids", "labels")
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    IS_NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    micro_batch: MicroBatch
    is_not_finite: bool
    ids: _swarm_pb2.Tensor
    labels: _swarm_pb2.Tensor
    def __init__(self, micro_batch: _Optional[_Union[MicroBatch, _Mapping]] = ..., is_not_finite: bool = ..., ids: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ..., labels: _Optional[_Union[_swarm_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("is_committed",)
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    is_committed: bool
    def __init__(self, is_committed: bool = ...) -> None: ...

class TrainerRecord(_message.Message):
    __slots__ = ("first_step", "has_left")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_LEFT_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    has_left: bool
    def __init__(self, first_step: _Optional[int] = ..., has_left: bool = ...) -> None: ...
