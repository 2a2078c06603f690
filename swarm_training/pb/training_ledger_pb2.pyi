from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SignedByPeer(_message.Message):
    __slots__ = ("content", "public_key", "signature", "token")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    public_key: bytes
    signature: bytes
    token: bytes
    def __init__(self, content: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., token: _Optional[bytes] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("run", "rollbacks", "step", "peer_id", "samples")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run: str
    rollbacks: int
    step: int
    peer_id: str
    samples: int
    def __init__(self, run: _Optional[str] = ..., rollbacks: _Optional[int] = ..., step: _Optional[int] = ..., peer_id: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("run", "rollbacks", "step", "ended_at", "contributions")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    run: str
    rollbacks: int
    step: int
    ended_at: float
    contributions: _containers.RepeatedCompositeFieldContainer[SignedByPeer]
    def __init__(self, run: _Optional[str] = ..., rollbacks: _Optional[int] = ..., step: _Optional[int] = ..., ended_at: _Optional[float] = ..., contributions: _Optional[_Iterable[_Union[SignedByPeer, _Mapping]]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("run", "id", "issued_at", "expires_at", "ban", "go_back")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    BAN_FIELD_NUMBER: _ClassVar[int]
    GO_BACK_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: bytes
    issued_at: float
    expires_at: float
    ban: Ban
    go_back: GoBack
    def __init__(self, run: _Optional[str] = ..., id: _Optional[bytes] = ..., issued_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., ban: _Optional[_Union[Ban, _Mapping]] = ..., go_back: _Optional[_Union[GoBack, _Mapping]] = ...) -> None: ...

class Ban(_message.Message):
    __slots__ = ("peer_id", "reason")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    reason: str
    def __init__(self, peer_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GoBack(_message.Message):
    __slots__ = ("step", "rollbacks")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rollbacks: int
    def __init__(self, step: _Optional[int] = ..., rollbacks: _Optional[int] = ...) -> None: ...
