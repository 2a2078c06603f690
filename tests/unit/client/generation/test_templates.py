"""Chat templates of strangers: what they say, and that they come to an end."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
from transformers import AutoTokenizer

from swarm_client.generation.templates import render
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate

TURNS = [{"role": "user", "content": "Sort"}]
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = {
    "nested loops": NESTED,
    "a loop in a macro": "{% macro f() %}" + NESTED + "{% endmacro %}{{ f() }}",
    "a loop of long lines": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return copy.deepcopy(AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL)))


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_does_not_end_is_refused(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = LOOPS[name]
    before = sys.gettrace()
    with pytest.raises(ValueError, match="the model's chat template refuses this"):
        render(tokenizer, TURNS, most_cpu_s=0.05)
    assert sys.gettrace() is before


def test_any_error_of_a_template_is_a_refusal(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ 1 // 0 }}"
    with pytest.raises(ValueError, match="the model's chat template refuses this"):
        render(tokenizer, TURNS)


def test_a_template_has_time_for_a_long_conversation(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% endfor %}"
    )
    assert render(tokenizer, TURNS * 3000) == "Sort" * 3000
