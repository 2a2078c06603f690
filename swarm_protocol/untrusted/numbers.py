"""Ranges of the numbers in configs: untrusted numbers are checked before anything is built from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import shown


@dataclass(frozen=True)
class Expected:
    """The allowed range of a number.

    Attributes:
        low, high: the least and the greatest value. ``low`` itself is refused if ``above``, ``high`` if ``below``.
        whole: the value must be written as a whole number.
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False
    below: bool = False

    def admits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        is_end = (self.above and value == self.low) or (self.below and value == self.high)
        return self.low <= value <= self.high and not is_end

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        least, most = "above" if self.above else "of at least", "below" if self.below else "at most"
        return f"{kind} {least} {self.low:.15g}, {most} {self.high:.15g}"


COUNT = Expected(1, 1 << 30, whole=True)
SIZE = Expected(0, 1 << 30, whole=True)
SHARE = Expected(0, 1)
SCALE = Expected(0, 1e6)
ANY = Expected(-1e30, 1e30)

# Keys of a model's config, by transformers' names. A family's own names are translated first.
_MODEL: tuple[tuple[re.Pattern[str], Expected], ...] = tuple(
    (re.compile(names), expected)
    for names, expected in (
        ("num_hidden_layers", Expected(1, 4096, whole=True)),
        ("hidden_size", Expected(1, 1 << 20, whole=True)),
        ("vocab_size|num_attention_heads|num_key_value_heads|num_kv_heads", COUNT),
        ("(original_)?max_position_embeddings", COUNT),
        (r"(\w+_)?(head_dim|intermediate_size|ffn_dim|lora_rank|state_size)|n_inner|sliding_window", SIZE),
        (r"num_experts_per_tok|((num|n)_(\w+_)?experts)", Expected(0, 1 << 16, whole=True)),
        (r"\w+_(eps|epsilon)", Expected(0, 1, above=True)),
        (
            r"rope_theta|rope_local_base_freq|rotary_emb_base|factor|(low|high)_freq_factor",
            Expected(0, 1e15, above=True),
        ),
        (r"(long|short)_factor|beta_fast|beta_slow", Expected(0, 1e6, above=True)),
        (r"attention_factor|mscale(_all_dim)?|partial_rotary_factor|rotary_pct", SCALE),
        (r"(\w+_)?(dropout|pdrop|dropout_prob)", SHARE),
    )
)
_MAY_BE_INFINITE = "time_step_limit"  # of mamba2
_LONGEST_KEY = 100  # longer keys are not shown whole
_FLOAT = "__float__"  # transformers writes infinity as {"__float__": "Infinity"}


def require_model_numbers(config: Mapping[str, Any], path: Path, aliases: Mapping[str, str]) -> None:
    """Check the numbers of a model's config; null stands for the default, a list for one value per block.

    Args:
        aliases: the family's own names for keys, by transformers' names.

    Raises:
        CheckpointError: a number is out of range; the message names file, key, value and the expected range.
    """
    names = {own: common for common, own in aliases.items()}  # transformers' names by the family's own
    for key, value in _leaves(config):
        expected = next((expected for name, expected in _MODEL if name.fullmatch(names.get(key, key))), None)
        if expected is None:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not ANY.admits(value) and not (key == _MAY_BE_INFINITE and value == inf):
                _refuse(path, key, value, "a finite number")
        elif value is not None and not expected.admits(value):
            _refuse(path, key, value, str(expected))


def require_finite(config: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if the config contains an infinite number or NaN."""
    for key, value in _leaves(config):
        if isinstance(value, float) and not isfinite(value):
            _refuse(path, key, value, "a finite number")


def require_number(value: object, expected: Expected, path: Path, key: str) -> None:
    """Raise CheckpointError unless the value is a number in the expected range."""
    if not expected.admits(value):
        _refuse(path, key, value, str(expected))


def _refuse(path: Path, key: str, value: object, expected: str) -> None:
    name = key if key.isprintable() and len(key) <= _LONGEST_KEY else shown(key)
    raise CheckpointError(f"{path} has {name}={shown(value)}: expected {expected}")


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all values that are no containers, each with the name of the nearest key above it."""
    rest: list[tuple[str, Any]] = list(config.items())
    while rest:
        key, value = rest.pop()
        if isinstance(value, dict):
            special = value.get(_FLOAT)
            if isinstance(special, str) and len(value) == 1:
                yield key, _special_float(special)
            else:
                rest += value.items()
        elif isinstance(value, list):
            rest += [(key, element) for element in value]
        else:
            yield key, value


def _special_float(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
