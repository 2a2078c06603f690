from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Statement(_message.Message):
    __slots__ = ("content", "public_key", "signature", "endorsements")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ENDORSEMENTS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    public_key: bytes
    signature: bytes
    endorsements: _containers.RepeatedCompositeFieldContainer[Endorsement]
    def __init__(self, content: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., endorsements: _Optional[_Iterable[_Union[Endorsement, _Mapping]]] = ...) -> None: ...

class Endorsement(_message.Message):
    __slots__ = ("public_key", "signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Said(_message.Message):
    __slots__ = ("session", "step", "attempt", "ready", "welcome", "vote", "commitment", "receipt", "parts_opened", "aggregate_committed", "reveal", "aggregate_opened", "projections", "accusations", "evidence_opened", "measurements", "equivocations")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    PARTS_OPENED_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REVEAL_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_OPENED_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    ACCUSATIONS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_OPENED_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_FIELD_NUMBER: _ClassVar[int]
    EQUIVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    step: int
    attempt: int
    ready: Ready
    welcome: Welcome
    vote: Vote
    commitment: Commitment
    receipt: Receipt
    parts_opened: Opened
    aggregate_committed: bytes
    reveal: Reveal
    aggregate_opened: bytes
    projections: Projections
    accusations: Accusations
    evidence_opened: Opened
    measurements: Measurements
    equivocations: _containers.RepeatedCompositeFieldContainer[Equivocation]
    def __init__(self, session: _Optional[bytes] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., commitment: _Optional[_Union[Commitment, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., parts_opened: _Optional[_Union[Opened, _Mapping]] = ..., aggregate_committed: _Optional[bytes] = ..., reveal: _Optional[_Union[Reveal, _Mapping]] = ..., aggregate_opened: _Optional[bytes] = ..., projections: _Optional[_Union[Projections, _Mapping]] = ..., accusations: _Optional[_Union[Accusations, _Mapping]] = ..., evidence_opened: _Optional[_Union[Opened, _Mapping]] = ..., measurements: _Optional[_Union[Measurements, _Mapping]] = ..., equivocations: _Optional[_Iterable[_Union[Equivocation, _Mapping]]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("phase", "digests")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    phase: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, phase: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Commitment(_message.Message):
    __slots__ = ("seed_hash", "distance", "parts")
    SEED_HASH_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    seed_hash: bytes
    distance: float
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, seed_hash: _Optional[bytes] = ..., distance: _Optional[float] = ..., parts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing: _Optional[_Iterable[str]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("step", "attempt", "worker", "owner")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    worker: str
    owner: str
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., worker: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("items", "digests")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Reveal(_message.Message):
    __slots__ = ("seed", "missing")
    SEED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    seed: bytes
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seed: _Optional[bytes] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class Projections(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class Accusation(_message.Message):
    __slots__ = ("case", "worker", "owner", "measured")
    class Case(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FALSE_PROJECTION: _ClassVar[Accusation.Case]
        FALSE_GRADIENT: _ClassVar[Accusation.Case]
    FALSE_PROJECTION: Accusation.Case
    FALSE_GRADIENT: Accusation.Case
    CASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    case: Accusation.Case
    worker: str
    owner: str
    measured: float
    def __init__(self, case: _Optional[_Union[Accusation.Case, str]] = ..., worker: _Optional[str] = ..., owner: _Optional[str] = ..., measured: _Optional[float] = ...) -> None: ...

class Accusations(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Accusation]
    def __init__(self, items: _Optional[_Iterable[_Union[Accusation, _Mapping]]] = ...) -> None: ...

class Equivocation(_message.Message):
    __slots__ = ("first", "second")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    first: Statement
    second: Statement
    def __init__(self, first: _Optional[_Union[Statement, _Mapping]] = ..., second: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class Measurements(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    def __init__(self, rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class TellRequest(_message.Message):
    __slots__ = ("statements",)
    STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    statements: _containers.RepeatedCompositeFieldContainer[Statement]
    def __init__(self, statements: _Optional[_Iterable[_Union[Statement, _Mapping]]] = ...) -> None: ...

class TellReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StandingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandingsPart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("peer", "audits_passed", "absences", "unfounded")
    PEER_FIELD_NUMBER: _ClassVar[int]
    AUDITS_PASSED_FIELD_NUMBER: _ClassVar[int]
    ABSENCES_FIELD_NUMBER: _ClassVar[int]
    UNFOUNDED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    audits_passed: int
    absences: int
    unfounded: int
    def __init__(self, peer: _Optional[str] = ..., audits_passed: _Optional[int] = ..., absences: _Optional[int] = ..., unfounded: _Optional[int] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("worker", "parts", "projections")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    projections: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, worker: _Optional[str] = ..., parts: _Optional[_Iterable[bytes]] = ..., projections: _Optional[_Iterable[float]] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("validator", "target")
    VALIDATOR_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    validator: str
    target: str
    def __init__(self, validator: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class Removed(_message.Message):
    __slots__ = ("peer", "reason", "is_banned")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_BANNED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    is_banned: bool
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ..., is_banned: bool = ...) -> None: ...

class Standings(_message.Message):
    __slots__ = ("session", "step", "standings", "removed", "audits", "attempt", "owners", "workers", "tau", "seed", "contributions", "joined", "state", "state_bytes", "result")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    step: int
    standings: _containers.RepeatedCompositeFieldContainer[Standing]
    removed: _containers.RepeatedCompositeFieldContainer[Removed]
    audits: _containers.RepeatedCompositeFieldContainer[Audit]
    attempt: int
    owners: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedScalarFieldContainer[str]
    tau: float
    seed: bytes
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    joined: _containers.RepeatedScalarFieldContainer[str]
    state: bytes
    state_bytes: int
    result: bytes
    def __init__(self, session: _Optional[bytes] = ..., step: _Optional[int] = ..., standings: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[Removed, _Mapping]]] = ..., audits: _Optional[_Iterable[_Union[Audit, _Mapping]]] = ..., attempt: _Optional[int] = ..., owners: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[str]] = ..., tau: _Optional[float] = ..., seed: _Optional[bytes] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., joined: _Optional[_Iterable[str]] = ..., state: _Optional[bytes] = ..., state_bytes: _Optional[int] = ..., result: _Optional[bytes] = ...) -> None: ...
