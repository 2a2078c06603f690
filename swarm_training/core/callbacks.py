"""The types of functions that a caller hands in."""

from collections.abc import Awaitable, Callable
from typing import Any

Command = Callable[[], None]  # what a command line was asked for
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]  # calls a function that takes long in another thread
Say = Callable[[str], object]  # shows a line to whoever started the process
