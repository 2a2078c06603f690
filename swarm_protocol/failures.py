"""The ends of code and objects: a block that fails is undone, translated or logged, and a lost owner is noticed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Self, TypeVar

T = TypeVar("T")


class undone_on_error(AbstractContextManager[None]):
    """A context that calls ``undo`` if it ends with an error or an interruption, which then goes on to the caller."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:  # Ctrl-C and cancellation leave half of the work behind as errors do
            self._undo()


class awaited_on_error(AbstractAsyncContextManager[None]):
    """A context that awaits ``undo()`` if it ends with an error or a cancellation, which then goes on to the caller."""

    def __init__(self, undo: Callable[[], Awaitable[object]]) -> None:
        self._undo = undo

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            await self._undo()


@contextmanager
def any_error_as(translation: Callable[[Exception], Exception]) -> Iterator[None]:
    """Raise ``translation(error)`` in place of any error, where a caller can only handle the translation.

    This is for foreign code that works on files of strangers, which may raise any exception: transformers compares and
    calls the values that it finds in a configuration, tokenizers are written in Rust, and decoders of pictures and
    numpy stumble over sizes that do not fit. It is also for servers, whose clients get an answer for each error.
    """
    try:
        yield
    except Exception as error:  # the reason is in the docstring; interruptions go on as they are
        translated = translation(error)
        raise translated from None if translated is error else error  # an error that is its own cause is a cycle


def outcome_of(work: Callable[[], T]) -> T | Exception:
    """Return what ``work`` returns, or the error that it raises, for callers that go on otherwise after any error.

    This is for code of model families, drivers and users, which may raise any exception, as in ``any_error_as``.
    """
    try:
        return work()
    except Exception as error:  # the reason is in the docstring; interruptions go on as they are
        return error


class logged_errors(AbstractContextManager[None]):
    """A context that logs its error and suppresses it. A warning has no traceback, other levels have one.

    This is for work that must not end its caller, whatever it meets: callbacks of users, and work that is repeated.
    """

    def __init__(self, logger: logging.Logger, message: str, *arguments: object, level: int = logging.ERROR) -> None:
        self._logger, self._message, self._arguments, self._level = logger, message, arguments, level

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):  # interruptions go on as they are
            return False
        if self._level == logging.WARNING:
            self._logger.warning(f"{self._message}: %s", *self._arguments, one_line(error))
        else:
            self._logger.log(self._level, self._message, *self._arguments, exc_info=error)
        return True


class Closing:
    """An object that has to be closed. The end of its context closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def call_after(owner: object, function: Callable[..., object], *arguments: object) -> None:
    """Call a function once ``owner`` has been collected as garbage, but not at the end of the process."""
    weakref.finalize(owner, function, *arguments).atexit = False


def one_line(error: BaseException) -> str:
    """Return the error's message in one line, or the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or the name of its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
