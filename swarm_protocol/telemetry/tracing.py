"""The spans of distributed traces. They record nothing, and cost nothing, until ``use`` sets a tracing that records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

Attributes = Mapping[str, Any]  # values: str, bool, int, float, or sequences of these; never a user's text
Headers = Sequence[tuple[str, str]]
NO_ATTRIBUTES: Attributes = MappingProxyType({})


class TraceSpan(Protocol):
    """A span of a trace. The spans of OpenTelemetry are of this kind."""

    def set_attributes(self, attributes: Attributes) -> None: ...

    def end(self) -> None: ...


class _Unrecorded:
    def set_attributes(self, attributes: Attributes) -> None:
        pass

    def end(self) -> None:
        pass


UNRECORDED: TraceSpan = _Unrecorded()


class Tracing:
    """A tracing that records nothing, and the base class of the one that does."""

    def span(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> AbstractContextManager[TraceSpan]:
        """Return a context in which a new span is the current one: a child of the span that was current before."""
        return nullcontext(UNRECORDED)

    def begin(self, name: str) -> TraceSpan:
        """Begin a child of the current span without making it the current one. The caller must end it."""
        return UNRECORDED

    def call(
        self, name: str, attributes: Attributes, headers: Iterable[tuple[str, Any]]
    ) -> AbstractContextManager[TraceSpan]:
        """Return ``span`` for a call from another process. Nothing is recorded unless its headers name a trace."""
        return nullcontext(UNRECORDED)

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event to the current span."""

    def headers(self) -> Headers:
        """Return the headers with which another process continues the current trace; none outside traces."""
        return ()


_tracing = Tracing()


def tracing() -> Tracing:
    """Return the tracing of this process."""
    return _tracing


def use(other: Tracing) -> None:
    """Set the tracing of this process."""
    global _tracing
    _tracing = other
