"""The ends of code and objects: a block that fails is undone, translated or logged, and a lost owner is noticed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the context ends with an error or an interruption, which then goes on to the caller."""
    try:
        yield
    except BaseException:  # raised again; Ctrl-C and cancellation leave half of the work behind as errors do
        undo()
        raise


@asynccontextmanager
async def awaited_on_error(undo: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await ``undo()`` if the context ends with an error or a cancellation, which then goes on to the caller."""
    try:
        yield
    except BaseException:  # raised again, as above
        await undo()
        raise


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
        raise translated from None if translated is error else error


@contextmanager
def logged_errors(
    logger: logging.Logger, message: str, *arguments: object, level: int = logging.ERROR
) -> Iterator[None]:
    """Log an error of the context, and go on behind the context. A warning has no traceback, other levels have one.

    This is for work that must not end its caller, whatever it meets: callbacks of users, and work that is repeated.
    """
    try:
        yield
    except Exception as error:  # the reason is in the docstring; interruptions go on as they are
        if level == logging.WARNING:
            logger.warning(f"{message}: %s", *arguments, one_line(error))
        else:
            logger.log(level, message, *arguments, exc_info=True)


def call_after(owner: object, function: Callable[..., object], *arguments: object) -> None:
    """Call a function once ``owner`` has been collected as garbage, but not at the end of the process."""
    weakref.finalize(owner, function, *arguments).atexit = False


def one_line(error: BaseException) -> str:
    """Return the error's message in one line, or the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or the name of its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
