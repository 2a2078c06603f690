"""The names by which users choose drafts."""

from __future__ import annotations

from pathlib import Path

from swarm_models.checkpoints.default_model import check_location, locate

AUTO, NONE, LOOKUP = "auto", "none", "lookup"


def is_draft_file(name: str) -> bool:
    """Return whether the name is a distilled draft's, which is one file, and no model of its own."""
    return name.endswith(".safetensors")


def check_draft_name(name: str) -> None:
    """Raise ValueError if no draft can have this name."""
    if name in (AUTO, NONE, LOOKUP):
        return
    if is_draft_file(name):
        if not Path(name).is_file():
            raise ValueError(f"draft: {name} does not exist; expected a file that examples/train_draft.py has made")
        return
    try:
        check_location(locate(name))
    except ValueError as error:
        raise ValueError(
            f"draft: {error}; expected auto, none, lookup, the name or directory of a model with the same tokenizer, "
            "or a file of a draft that was distilled from this model"
        ) from None
