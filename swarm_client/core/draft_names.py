"""How drafts are named by users."""

from __future__ import annotations

from swarm_protocol.checkpoints.default_model import check_location, locate

AUTO, NONE, LOOKUP = "auto", "none", "lookup"


def check_draft_name(name: str) -> None:
    """Raises ValueError if there can be no such draft."""
    if name in (AUTO, NONE, LOOKUP):
        return
    try:
        check_location(locate(name))
    except ValueError as error:
        raise ValueError(
            f"draft: {error}; expected auto, none, lookup, or the name or directory of a model with the same tokenizer"
        ) from None
