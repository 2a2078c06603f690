"""Logging to stderr: lines of text for people, or one JSON object per line for programs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

ERASE_LINE = "\r\x1b[K"  # for terminals: back to the beginning of the line, which is empty then
FOREGROUND = "SWARM_FOREGROUND"  # the process group of the command that this process is a part of
LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
_QUIET = ("httpx", "huggingface_hub", "asyncio", "grpc", "bitsandbytes")
_FIELDS = "fields"  # the attribute of a log record with values that a program would else parse from the message
_logger = logging.getLogger("swarm")


class JsonLines(logging.Formatter):
    """A JSON formatter: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, event fields, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def start_logging(args: argparse.Namespace, text: logging.Formatter | None = None) -> None:
    """Set up logging from ``--log-level`` and ``--log-format``; third-party libraries log only errors.

    Args:
        text: the formatter for text lines; by default the message alone.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if args.log_format == "json" else text or logging.Formatter("%(message)s"))
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not shows_progress():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
    if args.log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def writes_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.root.handlers)


def shows_progress() -> bool:
    """Return whether progress bars may be shown: stderr is a terminal, and logs are not JSON."""
    return sys.stderr.isatty() and not writes_json()


def progress_bar(total: int, description: str, **options: Any) -> tqdm[Any]:
    """Return a progress bar on stderr, which is removed at its end. ``options``: those of ``tqdm``."""
    from tqdm import tqdm

    shown = shows_progress()
    return tqdm(total=total, desc=description, file=sys.stderr, leave=False, disable=not shown, **options)


def is_in_foreground() -> bool:
    """Return whether this command has the terminal at stderr at present, and not the shell that started it."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == int(os.environ.get(FOREGROUND) or os.getpgrp())
    except (AttributeError, OSError, ValueError):  # Windows, or not the controlling terminal: no shell shares it
        return True


def log_event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """Log a message; JSON output contains its parts as fields."""
    logger.info("%s", message, extra={_FIELDS: fields})


def say_error(error: BaseException) -> None:
    """Print or log the error that ends a command, in one line."""
    if writes_json():
        _logger.error("%s", error)
    else:
        print(f"error: {error}", file=sys.stderr)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _logger.critical("%s", error, exc_info=(kind, error, trace))
