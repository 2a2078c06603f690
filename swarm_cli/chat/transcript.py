"""Files of conversations: JSON with the messages in the format of OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarm_cli.chat.conversation import Message
from swarm_protocol.atomic_file import write_new, written_atomically

_MAX_BYTES = 64 << 20


def save(path: Path, model: str, messages: list[Message], *, overwrite: bool) -> None:
    """Write the conversation, completely or not at all. Raise ValueError if the file cannot be written."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory: expected a file")
    text = json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=2) + "\n"
    data = text.encode(errors="backslashreplace")  # typed bytes that are no UTF-8: JSON has the same escapes
    try:
        if overwrite:
            with written_atomically(path) as partial:
                write_new(partial, data)  # only this user can read it
        else:
            write_new(path, data)
    except FileExistsError:
        raise ValueError(f"{path} is there already: /save! {path} overwrites it") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def load(path: Path) -> list[Message]:
    """Return the messages in a file. Raise ValueError if the file cannot be read, or has no conversation."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} is larger than {_MAX_BYTES >> 20} MiB: expected a conversation")
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f'{path} has no "messages": expected a list of {{"role": …, "content": …}}')
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError(f"{path} is no conversation: expected turns of user and assistant, one after the other")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
