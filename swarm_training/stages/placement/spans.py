"""The blocks of each stage of a model, and the cost of a micro-batch at each of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from swarm_models.checkpoints.describing import describe
from swarm_protocol.span import Span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def split(num_blocks: int, num_stages: int) -> list[Span]:
    """Return the blocks of ``num_stages`` stages. Each stage has as many blocks as any other, or one less. Raise
    ValueError if there are more stages than blocks, or none."""
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot be split into {num_stages} stages: expected 1 to {num_blocks}")
    borders = [number * num_blocks // num_stages for number in range(num_stages + 1)]
    return [Span(start, end) for start, end in pairwise(borders)]


def spans_of_stages(config: PreTrainedConfig, num_stages: int) -> list[Span]:
    """Return the blocks of each stage. Raises ValueError if the model has fewer blocks than stages."""
    return split(describe(config).num_blocks, num_stages)


def stage_with(blocks: Span, spans: Sequence[Span]) -> int:
    """Return the stage that has exactly these blocks. Raises ValueError if there is none."""
    if blocks not in spans:
        known = ", ".join(f"{span} (stage {index})" for index, span in enumerate(spans))
        raise ValueError(f"blocks {blocks} are no stage of the run: expected one of {known}")
    return list(spans).index(blocks)


def costs_of(config: PreTrainedConfig, spans: Sequence[Span]) -> list[float]:
    """Return the cost of a micro-batch at each stage, in blocks; the last stage computes the head too.

    A block of width h has about 12 h² weights, or 4 h² + 3 h i with a gated feed-forward of width i (Vaswani et al.,
    2017; Shazeer, 2020). The head of a vocabulary of v has h v weights.
    """
    text = config.get_text_config()
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None)
    block = 4 * hidden + (3 * inner if isinstance(inner, int) else 8 * hidden)
    head = text.vocab_size / block
    return [len(span) + (head if index == len(spans) - 1 else 0.0) for index, span in enumerate(spans)]
