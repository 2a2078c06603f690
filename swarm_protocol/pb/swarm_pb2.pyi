from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    BFLOAT16: _ClassVar[DType]
    FLOAT16: _ClassVar[DType]
    INT64: _ClassVar[DType]
    UINT8: _ClassVar[DType]
    INT32: _ClassVar[DType]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAW: _ClassVar[Codec]
    INT8_BLOCKS: _ClassVar[Codec]
    BFLOAT16_ELEMENTS: _ClassVar[Codec]
    INT4_BLOCKS: _ClassVar[Codec]

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[ServerState]
    JOINING: _ClassVar[ServerState]
    ONLINE: _ClassVar[ServerState]
    DRAINING: _ClassVar[ServerState]
    OFFLINE: _ClassVar[ServerState]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SERVER: _ClassVar[Role]
    ROLE_CLIENT: _ClassVar[Role]
    ROLE_TRAINER: _ClassVar[Role]
    ROLE_MODERATOR: _ClassVar[Role]
DTYPE_UNSPECIFIED: DType
FLOAT32: DType
BFLOAT16: DType
FLOAT16: DType
INT64: DType
UINT8: DType
INT32: DType
RAW: Codec
INT8_BLOCKS: Codec
BFLOAT16_ELEMENTS: Codec
INT4_BLOCKS: Codec
STATE_UNSPECIFIED: ServerState
JOINING: ServerState
ONLINE: ServerState
DRAINING: ServerState
OFFLINE: ServerState
ROLE_UNSPECIFIED: Role
ROLE_SERVER: Role
ROLE_CLIENT: Role
ROLE_TRAINER: Role
ROLE_MODERATOR: Role

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "codec", "size_bytes", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: Codec
    size_bytes: int
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[Codec, str]] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class AttentionMask(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("wire_version", "model", "revision", "blocks")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    model: str
    revision: str
    blocks: Span
    def __init__(self, wire_version: _Optional[int] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., blocks: _Optional[_Union[Span, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "step", "more", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    step: Step
    more: bytes
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., more: _Optional[bytes] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("contract", "session_key", "batch_size", "reserve_tokens", "next", "codec", "sent_number", "changed_number", "records_past", "adapter", "wait_s", "age_s", "spare_tokens", "last_number", "bundle_key", "user", "asked_s", "is_background", "num_copies", "copy_tokens")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHANGED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_PAST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SPARE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_KEY_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    ASKED_S_FIELD_NUMBER: _ClassVar[int]
    IS_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_FIELD_NUMBER: _ClassVar[int]
    COPY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    contract: Contract
    session_key: bytes
    batch_size: int
    reserve_tokens: int
    next: NextHop
    codec: Codec
    sent_number: int
    changed_number: int
    records_past: bool
    adapter: AdapterName
    wait_s: float
    age_s: float
    spare_tokens: int
    last_number: int
    bundle_key: bytes
    user: str
    asked_s: float
    is_background: bool
    num_copies: int
    copy_tokens: int
    def __init__(self, contract: _Optional[_Union[Contract, _Mapping]] = ..., session_key: _Optional[bytes] = ..., batch_size: _Optional[int] = ..., reserve_tokens: _Optional[int] = ..., next: _Optional[_Union[NextHop, _Mapping]] = ..., codec: _Optional[_Union[Codec, str]] = ..., sent_number: _Optional[int] = ..., changed_number: _Optional[int] = ..., records_past: bool = ..., adapter: _Optional[_Union[AdapterName, _Mapping]] = ..., wait_s: _Optional[float] = ..., age_s: _Optional[float] = ..., spare_tokens: _Optional[int] = ..., last_number: _Optional[int] = ..., bundle_key: _Optional[bytes] = ..., user: _Optional[str] = ..., asked_s: _Optional[float] = ..., is_background: bool = ..., num_copies: _Optional[int] = ..., copy_tokens: _Optional[int] = ...) -> None: ...

class NextHop(_message.Message):
    __slots__ = ("peer_id", "push_key", "codec")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    push_key: bytes
    codec: Codec
    def __init__(self, peer_id: _Optional[str] = ..., push_key: _Optional[bytes] = ..., codec: _Optional[_Union[Codec, str]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "changes", "start_position", "hidden", "attention_mask", "position_ids", "outputs_wanted", "stored", "every_block", "settled", "following_tokens", "joined")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASK_FIELD_NUMBER: _ClassVar[int]
    POSITION_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_WANTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVERY_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    number: int
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    start_position: int
    hidden: Tensor
    attention_mask: AttentionMask
    position_ids: Tensor
    outputs_wanted: int
    stored: Stored
    every_block: bool
    settled: bool
    following_tokens: int
    joined: Tensor
    def __init__(self, number: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., start_position: _Optional[int] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., attention_mask: _Optional[_Union[AttentionMask, _Mapping]] = ..., position_ids: _Optional[_Union[Tensor, _Mapping]] = ..., outputs_wanted: _Optional[int] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ..., every_block: bool = ..., settled: bool = ..., following_tokens: _Optional[int] = ..., joined: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("num_tokens", "num_kept", "data")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_kept: _containers.RepeatedScalarFieldContainer[int]
    data: Tensor
    def __init__(self, num_tokens: _Optional[int] = ..., num_kept: _Optional[_Iterable[int]] = ..., data: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("reorder", "crop", "record_past")
    REORDER_FIELD_NUMBER: _ClassVar[int]
    CROP_FIELD_NUMBER: _ClassVar[int]
    RECORD_PAST_FIELD_NUMBER: _ClassVar[int]
    reorder: Reorder
    crop: Crop
    record_past: RecordPast
    def __init__(self, reorder: _Optional[_Union[Reorder, _Mapping]] = ..., crop: _Optional[_Union[Crop, _Mapping]] = ..., record_past: _Optional[_Union[RecordPast, _Mapping]] = ...) -> None: ...

class Reorder(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Crop(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class RecordPast(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("opened", "output", "more", "failure", "leaving", "block_output")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    output: Output
    more: bytes
    failure: Failure
    leaving: Leaving
    block_output: BlockOutput
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., more: _Optional[bytes] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., block_output: _Optional[_Union[BlockOutput, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("tokens_left", "max_step_tokens", "queue_s")
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    tokens_left: int
    max_step_tokens: int
    queue_s: float
    def __init__(self, tokens_left: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("number", "hidden", "relay", "route", "active_sessions", "queue_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    hidden: Tensor
    relay: bool
    route: int
    active_sessions: int
    queue_s: float
    def __init__(self, number: _Optional[int] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., relay: bool = ..., route: _Optional[int] = ..., active_sessions: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class BlockOutput(_message.Message):
    __slots__ = ("number", "block", "hidden")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    block: int
    hidden: Tensor
    def __init__(self, number: _Optional[int] = ..., block: _Optional[int] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("status", "message", "number")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    status: int
    message: str
    number: int
    def __init__(self, status: _Optional[int] = ..., message: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("push_key", "step", "more")
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    push_key: bytes
    step: Step
    more: bytes
    def __init__(self, push_key: _Optional[bytes] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., more: _Optional[bytes] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class StepBundle(_message.Message):
    __slots__ = ("key", "steps")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    steps: _containers.RepeatedCompositeFieldContainer[KeyedStep]
    def __init__(self, key: _Optional[bytes] = ..., steps: _Optional[_Iterable[_Union[KeyedStep, _Mapping]]] = ...) -> None: ...

class KeyedStep(_message.Message):
    __slots__ = ("session_key", "step")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    step: Step
    def __init__(self, session_key: _Optional[bytes] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class ReplyBundle(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[KeyedReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[KeyedReply, _Mapping]]] = ...) -> None: ...

class KeyedReply(_message.Message):
    __slots__ = ("session_key", "reply")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    reply: SessionReply
    def __init__(self, session_key: _Optional[bytes] = ..., reply: _Optional[_Union[SessionReply, _Mapping]] = ...) -> None: ...

class PushBundle(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[PushedStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[PushedStep, _Mapping]]] = ...) -> None: ...

class PushedStep(_message.Message):
    __slots__ = ("push_key", "step")
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    push_key: bytes
    step: Step
    def __init__(self, push_key: _Optional[bytes] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class TakenBundle(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[TakenStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[TakenStep, _Mapping]]] = ...) -> None: ...

class TakenStep(_message.Message):
    __slots__ = ("push_key", "number", "lost")
    PUSH_KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    push_key: bytes
    number: int
    lost: bool
    def __init__(self, push_key: _Optional[bytes] = ..., number: _Optional[int] = ..., lost: bool = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ("session_key", "hold", "work")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    hold: bool
    work: bool
    def __init__(self, session_key: _Optional[bytes] = ..., hold: bool = ..., work: bool = ...) -> None: ...

class SessionProgress(_message.Message):
    __slots__ = ("number", "length", "batch_size", "computed", "num_batches", "num_waiting", "queue_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    length: int
    batch_size: int
    computed: int
    num_batches: int
    num_waiting: int
    queue_s: float
    def __init__(self, number: _Optional[int] = ..., length: _Optional[int] = ..., batch_size: _Optional[int] = ..., computed: _Optional[int] = ..., num_batches: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class RerouteRequest(_message.Message):
    __slots__ = ("session_key", "next", "route", "resend")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    next: NextHop
    route: int
    resend: _containers.RepeatedCompositeFieldContainer[Step]
    def __init__(self, session_key: _Optional[bytes] = ..., next: _Optional[_Union[NextHop, _Mapping]] = ..., route: _Optional[int] = ..., resend: _Optional[_Iterable[_Union[Step, _Mapping]]] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("session_key", "to")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    to: NextHop
    def __init__(self, session_key: _Optional[bytes] = ..., to: _Optional[_Union[NextHop, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("salt", "low_rank", "prompts")
    SALT_FIELD_NUMBER: _ClassVar[int]
    LOW_RANK_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    salt: bytes
    low_rank: _containers.RepeatedCompositeFieldContainer[LowRank]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, salt: _Optional[bytes] = ..., low_rank: _Optional[_Iterable[_Union[LowRank, _Mapping]]] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class LowRank(_message.Message):
    __slots__ = ("block", "module", "scaling", "dropout", "a", "b")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    block: int
    module: str
    scaling: float
    dropout: float
    a: Tensor
    b: Tensor
    def __init__(self, block: _Optional[int] = ..., module: _Optional[str] = ..., scaling: _Optional[float] = ..., dropout: _Optional[float] = ..., a: _Optional[_Union[Tensor, _Mapping]] = ..., b: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("block", "values")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    block: int
    values: Tensor
    def __init__(self, block: _Optional[int] = ..., values: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class PutAdapterRequest(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: bytes
    def __init__(self, part: _Optional[bytes] = ...) -> None: ...

class PutAdapterReply(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class AdapterName(_message.Message):
    __slots__ = ("key", "name")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    name: str
    def __init__(self, key: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("forward", "more")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    forward: Forward
    more: bytes
    def __init__(self, forward: _Optional[_Union[Forward, _Mapping]] = ..., more: _Optional[bytes] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("contract", "hidden", "attention_mask", "position_ids", "adapter", "dropout_seed", "keep_key", "packed", "sign", "joined", "codec")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASK_FIELD_NUMBER: _ClassVar[int]
    POSITION_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_SEED_FIELD_NUMBER: _ClassVar[int]
    KEEP_KEY_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    SIGN_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    contract: Contract
    hidden: Tensor
    attention_mask: AttentionMask
    position_ids: Tensor
    adapter: AdapterName
    dropout_seed: int
    keep_key: bytes
    packed: bool
    sign: bool
    joined: Tensor
    codec: Codec
    def __init__(self, contract: _Optional[_Union[Contract, _Mapping]] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., attention_mask: _Optional[_Union[AttentionMask, _Mapping]] = ..., position_ids: _Optional[_Union[Tensor, _Mapping]] = ..., adapter: _Optional[_Union[AdapterName, _Mapping]] = ..., dropout_seed: _Optional[int] = ..., keep_key: _Optional[bytes] = ..., packed: bool = ..., sign: bool = ..., joined: _Optional[_Union[Tensor, _Mapping]] = ..., codec: _Optional[_Union[Codec, str]] = ...) -> None: ...

class KeptForward(_message.Message):
    __slots__ = ("contract", "key")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    contract: Contract
    key: bytes
    def __init__(self, contract: _Optional[_Union[Contract, _Mapping]] = ..., key: _Optional[bytes] = ...) -> None: ...

class Summand(_message.Message):
    __slots__ = ("key", "number")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    number: int
    def __init__(self, key: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class TakeSum(_message.Message):
    __slots__ = ("contract", "key", "numbers")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    contract: Contract
    key: bytes
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, contract: _Optional[_Union[Contract, _Mapping]] = ..., key: _Optional[bytes] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class BackwardRequest(_message.Message):
    __slots__ = ("forward", "grad", "more", "kept", "take_sum", "summand", "codec")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    GRAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TAKE_SUM_FIELD_NUMBER: _ClassVar[int]
    SUMMAND_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    forward: Forward
    grad: Tensor
    more: bytes
    kept: KeptForward
    take_sum: TakeSum
    summand: Summand
    codec: Codec
    def __init__(self, forward: _Optional[_Union[Forward, _Mapping]] = ..., grad: _Optional[_Union[Tensor, _Mapping]] = ..., more: _Optional[bytes] = ..., kept: _Optional[_Union[KeptForward, _Mapping]] = ..., take_sum: _Optional[_Union[TakeSum, _Mapping]] = ..., summand: _Optional[_Union[Summand, _Mapping]] = ..., codec: _Optional[_Union[Codec, str]] = ...) -> None: ...

class TensorReply(_message.Message):
    __slots__ = ("output", "more", "kept", "statement", "summed")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    output: Tensor
    more: bytes
    kept: bool
    statement: SignedStatement
    summed: bool
    def __init__(self, output: _Optional[_Union[Tensor, _Mapping]] = ..., more: _Optional[bytes] = ..., kept: bool = ..., statement: _Optional[_Union[SignedStatement, _Mapping]] = ..., summed: bool = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("peer_id", "model", "revision", "blocks", "quant", "dtype", "device", "input_digest", "sketch", "made_at")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUANT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    model: str
    revision: str
    blocks: Span
    quant: str
    dtype: str
    device: str
    input_digest: bytes
    sketch: _containers.RepeatedScalarFieldContainer[float]
    made_at: float
    def __init__(self, peer_id: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., blocks: _Optional[_Union[Span, _Mapping]] = ..., quant: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., input_digest: _Optional[bytes] = ..., sketch: _Optional[_Iterable[float]] = ..., made_at: _Optional[float] = ...) -> None: ...

class SignedStatement(_message.Message):
    __slots__ = ("content", "signature", "public_key")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    signature: bytes
    public_key: bytes
    def __init__(self, content: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("statement", "seed", "hidden_size")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    statement: SignedStatement
    seed: bytes
    hidden_size: int
    def __init__(self, statement: _Optional[_Union[SignedStatement, _Mapping]] = ..., seed: _Optional[bytes] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class AccuseReply(_message.Message):
    __slots__ = ("is_shown",)
    IS_SHOWN_FIELD_NUMBER: _ClassVar[int]
    is_shown: bool
    def __init__(self, is_shown: bool = ...) -> None: ...

class DoubtRequest(_message.Message):
    __slots__ = ("peer_id",)
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    def __init__(self, peer_id: _Optional[str] = ...) -> None: ...

class DoubtReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Accusations(_message.Message):
    __slots__ = ("evidence", "doubted", "token")
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    evidence: _containers.RepeatedCompositeFieldContainer[Evidence]
    doubted: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    def __init__(self, evidence: _Optional[_Iterable[_Union[Evidence, _Mapping]]] = ..., doubted: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ...) -> None: ...

class GroupCandidate(_message.Message):
    __slots__ = ("sealed", "token")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    sealed: bytes
    token: bytes
    def __init__(self, sealed: _Optional[bytes] = ..., token: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EchoRequest(_message.Message):
    __slots__ = ("payload", "reply_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    reply_bytes: int
    def __init__(self, payload: _Optional[bytes] = ..., reply_bytes: _Optional[int] = ...) -> None: ...

class EchoReply(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("model", "revision", "files")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    files: _containers.RepeatedCompositeFieldContainer[SharedFile]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., files: _Optional[_Iterable[_Union[SharedFile, _Mapping]]] = ...) -> None: ...

class SharedFile(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256", "piece_sha256s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PIECE_SHA256S_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: bytes
    piece_sha256s: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., piece_sha256s: _Optional[bytes] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Offer(_message.Message):
    __slots__ = ("manifest", "held")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    held: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, manifest: _Optional[bytes] = ..., held: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OfferPart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class PieceRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class PiecePart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("decoded", "prompts", "passes", "uptime_s")
    DECODED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    decoded: int
    prompts: int
    passes: int
    uptime_s: float
    def __init__(self, decoded: _Optional[int] = ..., prompts: _Optional[int] = ..., passes: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class ServerRecord(_message.Message):
    __slots__ = ("peer_id", "wire_version", "software_version", "addresses", "model", "revision", "num_blocks", "blocks", "state", "quant", "dtype", "tokens_per_s", "cache_tokens_left", "queue_delay_s", "tls_fingerprint", "next_hop_rtts_s", "adapters", "max_request_bytes", "forward_tokens_per_s", "network_tokens_per_s", "pinned", "next_blocks", "device", "work", "cache_tokens", "token", "codecs", "relay_address", "weights", "joins", "members")
    class NextHopRttsSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUANT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    TLS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_HOP_RTTS_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NETWORK_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NEXT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    wire_version: int
    software_version: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    model: str
    revision: str
    num_blocks: int
    blocks: Span
    state: ServerState
    quant: str
    dtype: str
    tokens_per_s: float
    cache_tokens_left: int
    queue_delay_s: float
    tls_fingerprint: bytes
    next_hop_rtts_s: _containers.ScalarMap[str, float]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    max_request_bytes: int
    forward_tokens_per_s: float
    network_tokens_per_s: float
    pinned: bool
    next_blocks: Span
    device: str
    work: Work
    cache_tokens: int
    token: bytes
    codecs: _containers.RepeatedScalarFieldContainer[Codec]
    relay_address: str
    weights: bytes
    joins: bool
    members: int
    def __init__(self, peer_id: _Optional[str] = ..., wire_version: _Optional[int] = ..., software_version: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., num_blocks: _Optional[int] = ..., blocks: _Optional[_Union[Span, _Mapping]] = ..., state: _Optional[_Union[ServerState, str]] = ..., quant: _Optional[str] = ..., dtype: _Optional[str] = ..., tokens_per_s: _Optional[float] = ..., cache_tokens_left: _Optional[int] = ..., queue_delay_s: _Optional[float] = ..., tls_fingerprint: _Optional[bytes] = ..., next_hop_rtts_s: _Optional[_Mapping[str, float]] = ..., adapters: _Optional[_Iterable[str]] = ..., max_request_bytes: _Optional[int] = ..., forward_tokens_per_s: _Optional[float] = ..., network_tokens_per_s: _Optional[float] = ..., pinned: bool = ..., next_blocks: _Optional[_Union[Span, _Mapping]] = ..., device: _Optional[str] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., cache_tokens: _Optional[int] = ..., token: _Optional[bytes] = ..., codecs: _Optional[_Iterable[_Union[Codec, str]]] = ..., relay_address: _Optional[str] = ..., weights: _Optional[bytes] = ..., joins: bool = ..., members: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("swarm_key", "id", "role", "name", "peer_id", "granted_at", "expires_at")
    SWARM_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    swarm_key: bytes
    id: bytes
    role: Role
    name: str
    peer_id: str
    granted_at: float
    expires_at: float
    def __init__(self, swarm_key: _Optional[bytes] = ..., id: _Optional[bytes] = ..., role: _Optional[_Union[Role, str]] = ..., name: _Optional[str] = ..., peer_id: _Optional[str] = ..., granted_at: _Optional[float] = ..., expires_at: _Optional[float] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("swarm_key", "grant_id", "expires_at")
    SWARM_KEY_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    swarm_key: bytes
    grant_id: bytes
    expires_at: float
    def __init__(self, swarm_key: _Optional[bytes] = ..., grant_id: _Optional[bytes] = ..., expires_at: _Optional[float] = ...) -> None: ...

class Signed(_message.Message):
    __slots__ = ("content", "signature")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    signature: bytes
    def __init__(self, content: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MembershipFile(_message.Message):
    __slots__ = ("token", "identity")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    identity: bytes
    def __init__(self, token: _Optional[bytes] = ..., identity: _Optional[bytes] = ...) -> None: ...
