from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINING: _ClassVar[PeerState]
    MEETING: _ClassVar[PeerState]
    LEFT: _ClassVar[PeerState]
    JOINING: _ClassVar[PeerState]
TRAINING: PeerState
MEETING: PeerState
LEFT: PeerState
JOINING: PeerState

class Progress(_message.Message):
    __slots__ = ("wire_version", "run", "peer_id", "version", "state", "step", "samples", "samples_per_s", "call_s", "target_batch_size", "address", "tls_fingerprint", "share", "model", "state_digest", "result_digest", "loss", "loss_samples", "bytes_sent", "bytes_received", "rollbacks", "micro_batches", "accepted", "decided", "kept", "replica", "shared", "may_move", "next_stage", "excludes", "skipped_batches", "offers", "squared_norm", "global_squared_norm", "held_out", "newest_held_out", "best_held_out", "has_ended", "best")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CALL_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    MAY_MOVE_FIELD_NUMBER: _ClassVar[int]
    NEXT_STAGE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    BEST_HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    run: str
    peer_id: str
    version: int
    state: PeerState
    step: int
    samples: int
    samples_per_s: float
    call_s: float
    target_batch_size: int
    address: str
    tls_fingerprint: bytes
    share: float
    model: bytes
    state_digest: bytes
    result_digest: bytes
    loss: float
    loss_samples: int
    bytes_sent: int
    bytes_received: int
    rollbacks: int
    micro_batches: bytes
    accepted: bytes
    decided: bytes
    kept: Checkpoint
    replica: Checkpoint
    shared: Checkpoint
    may_move: bool
    next_stage: int
    excludes: _containers.RepeatedScalarFieldContainer[str]
    skipped_batches: int
    offers: _containers.RepeatedCompositeFieldContainer[StageCheckpoint]
    squared_norm: _containers.RepeatedScalarFieldContainer[float]
    global_squared_norm: float
    held_out: HeldOutLoss
    newest_held_out: HeldOutLoss
    best_held_out: HeldOutLoss
    has_ended: bool
    best: Checkpoint
    def __init__(self, wire_version: _Optional[int] = ..., run: _Optional[str] = ..., peer_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[PeerState, str]] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., call_s: _Optional[float] = ..., target_batch_size: _Optional[int] = ..., address: _Optional[str] = ..., tls_fingerprint: _Optional[bytes] = ..., share: _Optional[float] = ..., model: _Optional[bytes] = ..., state_digest: _Optional[bytes] = ..., result_digest: _Optional[bytes] = ..., loss: _Optional[float] = ..., loss_samples: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., rollbacks: _Optional[int] = ..., micro_batches: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., decided: _Optional[bytes] = ..., kept: _Optional[_Union[Checkpoint, _Mapping]] = ..., replica: _Optional[_Union[Checkpoint, _Mapping]] = ..., shared: _Optional[_Union[Checkpoint, _Mapping]] = ..., may_move: bool = ..., next_stage: _Optional[int] = ..., excludes: _Optional[_Iterable[str]] = ..., skipped_batches: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[StageCheckpoint, _Mapping]]] = ..., squared_norm: _Optional[_Iterable[float]] = ..., global_squared_norm: _Optional[float] = ..., held_out: _Optional[_Union[HeldOutLoss, _Mapping]] = ..., newest_held_out: _Optional[_Union[HeldOutLoss, _Mapping]] = ..., best_held_out: _Optional[_Union[HeldOutLoss, _Mapping]] = ..., has_ended: bool = ..., best: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class HeldOutLoss(_message.Message):
    __slots__ = ("step", "rollbacks", "loss", "samples")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    step: int
    rollbacks: int
    loss: float
    samples: int
    def __init__(self, step: _Optional[int] = ..., rollbacks: _Optional[int] = ..., loss: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class SignedProgress(_message.Message):
    __slots__ = ("progress", "public_key", "signature")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    progress: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, progress: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("own", "since", "orders_digest", "wait_s", "others")
    OWN_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    own: SignedProgress
    since: int
    orders_digest: bytes
    wait_s: float
    others: _containers.RepeatedCompositeFieldContainer[SignedProgress]
    def __init__(self, own: _Optional[_Union[SignedProgress, _Mapping]] = ..., since: _Optional[int] = ..., orders_digest: _Optional[bytes] = ..., wait_s: _Optional[float] = ..., others: _Optional[_Iterable[_Union[SignedProgress, _Mapping]]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("records", "until", "orders")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[SignedProgress]
    until: int
    orders: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, records: _Optional[_Iterable[_Union[SignedProgress, _Mapping]]] = ..., until: _Optional[int] = ..., orders: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishedOrders(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, orders: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("join", "report", "alive")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    report: Report
    alive: Alive
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("alive", "group", "dropped", "plan", "commit", "dismissal")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DISMISSAL_FIELD_NUMBER: _ClassVar[int]
    alive: Alive
    group: Group
    dropped: Dropped
    plan: Plan
    commit: Commit
    dismissal: Dismissal
    def __init__(self, alive: _Optional[_Union[Alive, _Mapping]] = ..., group: _Optional[_Union[Group, _Mapping]] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., dismissal: _Optional[_Union[Dismissal, _Mapping]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Join(_message.Message):
    __slots__ = ("own", "step", "samples", "promised", "accepted", "unreachable", "contribution", "rollbacks", "checkpoints")
    OWN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    own: SignedProgress
    step: int
    samples: int
    promised: int
    accepted: Accepted
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    contribution: bytes
    rollbacks: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, own: _Optional[_Union[SignedProgress, _Mapping]] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., promised: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., unreachable: _Optional[_Iterable[str]] = ..., contribution: _Optional[bytes] = ..., rollbacks: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("step", "state_digest", "born", "rollbacks", "skipped_batches")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BORN_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    step: int
    state_digest: bytes
    born: int
    rollbacks: int
    skipped_batches: int
    def __init__(self, step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., born: _Optional[int] = ..., rollbacks: _Optional[int] = ..., skipped_batches: _Optional[int] = ...) -> None: ...

class StageCheckpoint(_message.Message):
    __slots__ = ("stage", "checkpoint")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    checkpoint: Checkpoint
    def __init__(self, stage: _Optional[int] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("step", "state_digest", "order", "losses")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    step: int
    state_digest: bytes
    order: bytes
    losses: _containers.RepeatedCompositeFieldContainer[SignedProgress]
    def __init__(self, step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., order: _Optional[bytes] = ..., losses: _Optional[_Iterable[_Union[SignedProgress, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("ballot", "group", "digest", "layout", "roster", "go_back", "evaluations")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    GO_BACK_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    ballot: int
    group: str
    digest: bytes
    layout: _containers.RepeatedScalarFieldContainer[float]
    roster: _containers.RepeatedScalarFieldContainer[str]
    go_back: Rollback
    evaluations: _containers.RepeatedCompositeFieldContainer[SignedProgress]
    def __init__(self, ballot: _Optional[int] = ..., group: _Optional[str] = ..., digest: _Optional[bytes] = ..., layout: _Optional[_Iterable[float]] = ..., roster: _Optional[_Iterable[str]] = ..., go_back: _Optional[_Union[Rollback, _Mapping]] = ..., evaluations: _Optional[_Iterable[_Union[SignedProgress, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("record", "weight", "share")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    record: SignedProgress
    weight: int
    share: float
    def __init__(self, record: _Optional[_Union[SignedProgress, _Mapping]] = ..., weight: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("id", "step", "ballot", "members", "deadline_s", "continues", "layout", "roster", "grid", "go_back", "rollbacks", "evaluations")
    ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    GO_BACK_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    step: int
    ballot: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    deadline_s: float
    continues: str
    layout: _containers.RepeatedScalarFieldContainer[float]
    roster: _containers.RepeatedScalarFieldContainer[str]
    grid: bool
    go_back: Rollback
    rollbacks: int
    evaluations: _containers.RepeatedCompositeFieldContainer[SignedProgress]
    def __init__(self, id: _Optional[str] = ..., step: _Optional[int] = ..., ballot: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., deadline_s: _Optional[float] = ..., continues: _Optional[str] = ..., layout: _Optional[_Iterable[float]] = ..., roster: _Optional[_Iterable[str]] = ..., grid: bool = ..., go_back: _Optional[_Union[Rollback, _Mapping]] = ..., rollbacks: _Optional[int] = ..., evaluations: _Optional[_Iterable[_Union[SignedProgress, _Mapping]]] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("member",)
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    member: int
    def __init__(self, member: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("phase", "attempt", "num_chunks", "held", "broken", "digest")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    phase: int
    attempt: int
    num_chunks: int
    held: bytes
    broken: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    def __init__(self, phase: _Optional[int] = ..., attempt: _Optional[int] = ..., num_chunks: _Optional[int] = ..., held: _Optional[bytes] = ..., broken: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("chunk", "member")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    member: int
    def __init__(self, chunk: _Optional[int] = ..., member: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("phase", "attempt", "fetch", "redo")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    REDO_FIELD_NUMBER: _ClassVar[int]
    phase: int
    attempt: int
    fetch: _containers.RepeatedCompositeFieldContainer[Transfer]
    redo: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, phase: _Optional[int] = ..., attempt: _Optional[int] = ..., fetch: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., redo: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("digest", "round")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    round: bytes
    def __init__(self, digest: _Optional[bytes] = ..., round: _Optional[bytes] = ...) -> None: ...

class Dismissal(_message.Message):
    __slots__ = ("reason", "leader")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    leader: SignedProgress
    def __init__(self, reason: _Optional[str] = ..., leader: _Optional[_Union[SignedProgress, _Mapping]] = ...) -> None: ...

class ReduceRequest(_message.Message):
    __slots__ = ("open", "chunk", "row")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    open: ReduceOpen
    chunk: Chunk
    row: RowMean
    def __init__(self, open: _Optional[_Union[ReduceOpen, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., row: _Optional[_Union[RowMean, _Mapping]] = ...) -> None: ...

class ReduceOpen(_message.Message):
    __slots__ = ("group", "phase", "attempt")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group: str
    phase: int
    attempt: int
    def __init__(self, group: _Optional[str] = ..., phase: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "data", "counted")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    counted: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., counted: _Optional[bytes] = ...) -> None: ...

class RowMean(_message.Message):
    __slots__ = ("chunk", "weight")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    weight: float
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., weight: _Optional[float] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("group", "phase", "chunks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    group: str
    phase: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., phase: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("checkpoint", "header_only")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HEADER_ONLY_FIELD_NUMBER: _ClassVar[int]
    checkpoint: bytes
    header_only: bool
    def __init__(self, checkpoint: _Optional[bytes] = ..., header_only: bool = ...) -> None: ...

class StatePart(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: StateHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[StateHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("step", "size_bytes", "roster", "parameters", "optimizer", "result_digest", "rollbacks", "usual_losses", "num_high_losses", "went_back_to", "common", "global_squared_norm", "evaluations", "has_ended")
    class CommonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    RESULT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    USUAL_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_HIGH_LOSSES_FIELD_NUMBER: _ClassVar[int]
    WENT_BACK_TO_FIELD_NUMBER: _ClassVar[int]
    COMMON_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    step: int
    size_bytes: int
    roster: _containers.RepeatedScalarFieldContainer[str]
    parameters: _containers.RepeatedScalarFieldContainer[str]
    optimizer: str
    result_digest: bytes
    rollbacks: int
    usual_losses: _containers.RepeatedScalarFieldContainer[float]
    num_high_losses: int
    went_back_to: int
    common: _containers.ScalarMap[str, str]
    global_squared_norm: float
    evaluations: _containers.RepeatedCompositeFieldContainer[HeldOutLoss]
    has_ended: bool
    def __init__(self, step: _Optional[int] = ..., size_bytes: _Optional[int] = ..., roster: _Optional[_Iterable[str]] = ..., parameters: _Optional[_Iterable[str]] = ..., optimizer: _Optional[str] = ..., result_digest: _Optional[bytes] = ..., rollbacks: _Optional[int] = ..., usual_losses: _Optional[_Iterable[float]] = ..., num_high_losses: _Optional[int] = ..., went_back_to: _Optional[int] = ..., common: _Optional[_Mapping[str, str]] = ..., global_squared_norm: _Optional[float] = ..., evaluations: _Optional[_Iterable[_Union[HeldOutLoss, _Mapping]]] = ..., has_ended: bool = ...) -> None: ...

class RoundsRequest(_message.Message):
    __slots__ = ("since_rollbacks", "since_step", "known")
    SINCE_ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    SINCE_STEP_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    since_rollbacks: int
    since_step: int
    known: bytes
    def __init__(self, since_rollbacks: _Optional[int] = ..., since_step: _Optional[int] = ..., known: _Optional[bytes] = ...) -> None: ...

class RoundsReply(_message.Message):
    __slots__ = ("rounds", "has_more")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedScalarFieldContainer[bytes]
    has_more: bool
    def __init__(self, rounds: _Optional[_Iterable[bytes]] = ..., has_more: bool = ...) -> None: ...
