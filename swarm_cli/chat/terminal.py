"""Readers of turns: from a terminal, with a history, completion and several lines; or from a file or a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout

from swarm_cli.chat.answer import DIM, PLAIN
from swarm_cli.chat.commands import COMMANDS, NONE, SETTINGS
from swarm_protocol.process import signals
from swarm_protocol.process.logs import writes_json

PROMPT = "> "
_WITH_FILES = ("/adapter", "/model", "/save", "/save!", "/load")


class PipeReader:
    """A reader of turns from a file or a pipe, in which each line is a turn."""

    def read(self) -> str:
        """Return the next turn. Raise EOFError at the end, and KeyboardInterrupt at Ctrl-C."""
        return input()

    def say(self, text: str) -> None:
        """Print a message that is no answer."""
        print(text, file=sys.stderr)


class TerminalReader:
    """A reader of turns at a terminal. Enter ends a turn, unless the line ends with a backslash.

    Alt+Enter begins a new line, and pasted lines stay separate.
    """

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=lambda *_: "  ",
            key_bindings=_bindings(),
            history=_history(),
            completer=_CommandCompleter(),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            reserve_space_for_menu=4,
        )
        self._has_ended = False  # by a signal

    def read(self) -> str:
        with signals.held(self._end), patch_stdout(raw=True):  # log lines appear above the line being typed
            return self._session.prompt(pre_run=self._leave_if_ended)

    def _end(self) -> None:
        self._has_ended = True
        loop = self._session.app.loop
        if loop is not None:
            loop.call_soon_threadsafe(self._leave_if_ended)

    def _leave_if_ended(self) -> None:
        prompt = self._session.app
        if self._has_ended and prompt.future is not None and not prompt.future.done():
            prompt.exit(exception=EOFError())

    def say(self, text: str) -> None:
        sys.stdout.flush()  # the answer is on stdout, and belongs above
        print(f"{DIM}{text}{PLAIN}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def log_lines_dimmed() -> Iterator[None]:
    """Print log lines, such as that a server has died, as separate dim lines while the context is active."""
    if writes_json() or not sys.stderr.isatty():
        yield
        return
    before = logging.root.handlers[:]
    handler = _DimHandler()
    logging.root.handlers[:] = [handler]
    try:
        yield
    finally:
        logging.root.handlers[:] = before


class _DimHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # it is replaced while a turn is typed
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return f"\n{DIM}{super().format(record)}{PLAIN}"  # an answer may be in the middle of its line


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _end(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Return the user's history, which only the user can read; one in memory if the file cannot be written."""
    path = platformdirs.user_state_path("swarm") / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


class _CommandCompleter(Completer):
    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text.partition(" ")
        if not space:
            for command, about in COMMANDS.items():
                if command.startswith(name):
                    yield Completion(command, -len(name), display_meta=about.text)
            return
        words = {"/set": SETTINGS, "/adapter": (NONE,), "/system": (NONE,)}.get(name, ())
        for word in words:
            if word.startswith(argument):
                yield Completion(word, -len(argument))
        if name in _WITH_FILES:
            yield from self._paths.get_completions(Document(argument), event)


def greeting(model: Path | str) -> str:
    return f"{model}: /help shows commands, Alt+Enter begins another line, Ctrl-C stops an answer, Ctrl-D ends."
