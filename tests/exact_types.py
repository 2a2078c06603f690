"""Tries every type of causal language model of transformers: which of them split exactly, and why others do not.

``python -m tests.exact_types`` writes ``docs/reference/families.md``, in minutes. With ``--check`` it writes nothing,
and fails if a type that the page lists as exact is not so with the installed versions.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.family import OWN_CACHE_CLASS, TEXT_ALONE, Family, text_config
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, RecordPast, SessionStep
from swarm_server.kv.kv_cache import CacheBudget
from tests.splitting import (
    Swarm,
    difference_of_forward,
    difference_of_generation,
    load_whole,
    require_that_a_client_loads_its_own,
    run,
    tolerance_of_generation,
)
from tests.tiny_configs import tiny_config
from tests.vision_zoo import SEEING
from tests.zoo import INITIALIZER_RANGE, MODEL_TYPES, REJECTED, VOCAB

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
ROUNDING = (
    2e-4  # relative, of a server's sessions: they compute a recurrence of several tokens in another way than of one
)
STEPS, CROPPED, AFTERWARDS, PADDED = (5, 6, 1, 1, 3), 2, (1, 3), 3


def why_not(model_type: str) -> str | None:
    """Why a model of this type cannot be split; None if it splits exactly.

    Raises:
        AssertionError: it is not refused, and differs from the whole model.
    """
    config = tiny_config(model_type)
    if text_config(config) is not config:
        return why_not(text_config(config).model_type)
    if hasattr(config, "initializer_range"):
        config.initializer_range = INITIALIZER_RANGE
    try:
        family = describe(config)
    except UnsupportedModel as error:
        return re.sub(r"^.* cannot be split into blocks: ", "", str(error))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if not parameter.any():  # what begins with zeros would not be noticed, or makes ties
                nn.init.normal_(parameter, std=INITIALIZER_RANGE)
        model.save_pretrained(directory, max_shard_size="400KB")
        try:
            stack = load_blocks(ModelCheckpoint.open(directory), family.all_blocks)
        except CheckpointError:
            return "its checkpoints name their tensors in another way than its modules"
        swarm = Swarm(directory, load_whole(directory), (stack,))
        chain = swarm.chain("0:2", "2:6")
        difference = difference_of_forward(swarm, chain, padded=True)
        assert difference == 0, f"{model_type}: {difference} without a cache"
        for padded in (False, True) if model_type not in OWN_CACHE_CLASS else ():
            difference = difference_of_generation(swarm, chain, padded)
            assert difference <= tolerance_of_generation(model_type), f"{model_type}: {difference} with a cache"
        difference = difference_of_sessions(stack, swarm.whole)
        assert difference <= ROUNDING, f"{model_type}: {difference} in a server's session"
        require_that_a_client_loads_its_own(directory)
    return None


def difference_of_sessions(stack: BlockStack, whole: PreTrainedModel) -> float:
    """The largest relative difference of what a server's session gives, in chunks, single steps and after a crop.

    The whole model computes all positions at once, without a cache.
    """
    engine, family = Engine(stack), stack.family
    session = engine.open(stack.span, 2, CacheBudget(1 << 28, 1).lease("client"))
    generator = torch.Generator().manual_seed(0)
    total = sum(STEPS)
    ids = torch.randint(3, VOCAB, (2, total), generator=generator)
    other = torch.randint(3, VOCAB, (2, sum(AFTERWARDS)), generator=generator)
    crops = not session.layout.slots or session.layout.crops_states
    kept = total - CROPPED if crops else total
    largest = 0.0
    for tokens, start, lengths in (
        (ids, 0, STEPS),
        (torch.cat([ids[:, :kept], other], 1), kept, AFTERWARDS),
    ):
        mask = torch.ones_like(tokens)
        mask[0, :PADDED] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        hidden, expected = around_blocks(whole, family, tokens, mask, positions)
        changes = (RecordPast(),) if start == 0 else (Crop(start),) if crops else ()
        for length in lengths:
            end = start + length
            inputs = BlockInput(hidden[:, start:end], mask[:, :end], positions[:, start:end])
            (output,) = engine.run([(session, SessionStep(start, inputs, changes))])
            if isinstance(output, Exception):
                raise output
            attended = mask[:, start:end].bool()
            error = (output - expected[:, start:end])[attended].abs().max() / expected.abs().max()
            largest, start, changes = max(largest, float(error)), end, ()
    return largest


def around_blocks(
    whole: PreTrainedModel, family: Family, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the whole model's first block, and what comes out of its last."""
    blocks: nn.ModuleList = getattr(family.owner_of(whole), family.blocks)
    seen: list[torch.Tensor] = []
    hooks = [
        blocks[0].register_forward_pre_hook(
            lambda _block, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
        blocks[-1].register_forward_hook(
            lambda _block, _args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        ),
    ]
    with torch.inference_mode():
        run(whole, positions, input_ids=tokens, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return seen[0], seen[1]


# ---------------------------------------------------------------- the page

BEGIN = """# Families

On this page, you find each type of causal language model that transformers knows, and whether splitting it changes
anything. `python -m tests.exact_types` has tried all of them with transformers {version}, as tiny random models, and
writes this page.

## Exact

*Exact* means: a split over stacks of blocks computes bit for bit what the whole model computes, without a cache and,
step by step, with one; a server's sessions differ by rounding alone, in chunks, in single steps, after positions were
taken back, and beyond sliding windows; and a client loads the same embeddings and head. {count} types are:

"""
REFUSED = """

Those in bold are also tested through server processes, with gradients and beam search.

## Models that see

The language model inside these is tried like the others, and a type is listed above if its language model is exact.
Pictures are tested through servers with {seeing}.
Of {alone} servers compute text alone.

## Refused

Each is refused with the reason when a server or a client opens it.

| why | types |
|---|---|
"""


def render(reasons: dict[str, str | None]) -> str:
    """The page. ``reasons``: of each type why it does not split; None if it does."""
    exact = [name for name, reason in reasons.items() if reason is None]
    tested = MODEL_TYPES - set(REJECTED)
    names = ",\n".join(
        ", ".join(f"**{name}**" if name in tested else name for name in exact[start : start + 6])
        for start in range(0, len(exact), 6)
    )
    types_of: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            types_of.setdefault(reason, []).append(name)
    rows = [f"| {reason} | {', '.join(types)} |\n" for reason, types in sorted(types_of.items())]
    begin = BEGIN.format(version=transformers.__version__, count=len(exact))
    seeing = dict.fromkeys(name.partition("-")[0] for name in SEEING)  # with two language models, one name
    refused = REFUSED.format(seeing=", ".join(seeing), alone=", ".join(sorted(TEXT_ALONE)))
    return begin + names + refused + "".join(rows)


def listed() -> dict[str, bool]:
    """The types that the page names, and whether they are exact."""
    exact, _, refused = PAGE.read_text().partition("## Refused")
    names = re.split(r",\s+", exact.rpartition(" types are:")[2].partition("\n\nThose")[0].replace("**", "").strip())
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", refused, re.MULTILINE)
    return {**dict.fromkeys(names, True), **{name: False for cell in cells[1:] for name in cell.split(", ")}}


def outcomes() -> Iterator[tuple[str, str | None]]:
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        reason = why_not(model_type)
        print(f"{model_type}: {reason or 'exact'}", flush=True)
        yield model_type, reason


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reasons = dict(outcomes())
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(render(reasons))
        return
    expected = listed()
    lost = [name for name, reason in reasons.items() if reason is not None and expected.get(name)]
    new = [name for name, reason in reasons.items() if reason is None and not expected.get(name)]
    print(f"exact here, and not on the page: {', '.join(new) or 'none'}")
    if lost:
        sys.exit(f"exact on the page, and not here: {', '.join(lost)}")


if __name__ == "__main__":
    main()
