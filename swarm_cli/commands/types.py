"""The types of commands and their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

WITH_DEFAULTS = argparse.ArgumentDefaultsHelpFormatter
Command = Callable[[], None]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
