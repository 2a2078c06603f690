from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Open(_message.Message):
    __slots__ = ("target", "member", "caller", "caller_host", "port")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CALLER_HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    target: str
    member: Member
    caller: str
    caller_host: str
    port: int
    def __init__(self, target: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., caller: _Optional[str] = ..., caller_host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("refusal", "host", "port")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    host: str
    port: int
    def __init__(self, refusal: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("member", "keepalive_s")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_S_FIELD_NUMBER: _ClassVar[int]
    member: Member
    keepalive_s: float
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., keepalive_s: _Optional[float] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("refusal", "host")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    host: str
    def __init__(self, refusal: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("token", "public_key", "signature")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, token: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DialBack(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class DialedBack(_message.Message):
    __slots__ = ("reached", "host")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    reached: _containers.RepeatedScalarFieldContainer[str]
    host: str
    def __init__(self, reached: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ...) -> None: ...
