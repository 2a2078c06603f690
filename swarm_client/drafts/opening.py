"""The choice of a model's draft by the name that a user gives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from swarm_client.core.draft_names import AUTO, LOOKUP, NONE, check_draft_name, is_draft_file
from swarm_client.drafts.distilled.draft import load_distilled, own_draft
from swarm_client.drafts.lookup import LookupDraft
from swarm_client.drafts.small_model import SmallModelDraft
from swarm_client.speculation.draft import Draft
from swarm_client.speculation.speculation import Speculation
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import locate
from swarm_protocol.errors import CheckpointError

_RECURRENT = {"linear_attention", "hybrid"}  # types of layers in configs
_logger = logging.getLogger(__name__)
_LEAST_PASS_S = 0.04  # if the user asked for no draft, models faster than 25 tokens/s run without guesses


def open_speculation(name: str, model: Any, checkpoint: ModelCheckpoint) -> Speculation:
    """Return the speculation for a model.

    Args:
        name: auto, none, lookup, the name or directory of a model, or the file of a distilled draft.

    Raises:
        CheckpointError, UnsupportedModel: there is no such draft, or it cannot be read.
        ValueError: the draft has other tokens than the model, or was distilled from another model.
    """
    if name == NONE:
        return Speculation(None)
    obstacle = why_not(model)
    if obstacle:
        if name != AUTO:
            _logger.warning("no draft is used: %s", obstacle)
        return Speculation(None, off=obstacle)
    return Speculation(_open(name, model, checkpoint), least_pass_s=_LEAST_PASS_S if name == AUTO else 0.0)


def why_not(model: Any) -> str:
    """Return why no draft can guess for this model; an empty string if one can."""
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if model._is_stateful or kinds & _RECURRENT:  # ``_is_stateful`` is transformers' own flag
        return "the model has recurrent blocks, from whose state a wrong guess cannot be taken out again"
    return ""


def _open(name: str, model: Any, checkpoint: ModelCheckpoint) -> Draft:
    if name == AUTO:
        try:
            return own_draft(model) or LookupDraft()
        except ValueError as error:  # the user did not ask for this draft
            _logger.warning("the draft beside the model is not used: %s", error)
            return LookupDraft()
    if name == LOOKUP:
        return LookupDraft()
    if is_draft_file(name):
        return load_distilled(Path(name), model)
    vocab_size = model.get_input_embeddings().num_embeddings
    check_draft_name(name)
    _check_tokens(name, checkpoint)
    return SmallModelDraft.load(name, vocab_size)


def _check_tokens(name: str, checkpoint: ModelCheckpoint) -> None:
    """Raise ValueError unless the draft has the same tokens under the same ids as the model."""
    draft = ModelCheckpoint.open(locate(name))
    ours, theirs = _vocabulary(str(checkpoint.location)), _vocabulary(str(draft.location))
    if ours is None or theirs is None:  # only the sizes of the embeddings can be compared
        ours = theirs = {}
        sizes = checkpoint.config.vocab_size, draft.config.vocab_size
    else:
        sizes = len(ours), len(theirs)
    if sizes[0] != sizes[1] or ours != theirs:
        what = f"{sizes[1]} against {sizes[0]}" if sizes[0] != sizes[1] else f"{sizes[0]}, of which some differ"
        raise ValueError(
            f"draft {name} has other tokens than {checkpoint.name} ({what}): expected a model with the same tokenizer"
        )


def _vocabulary(location: str) -> dict[str, int] | None:
    """Return the model's token ids by token; None if the model has no readable tokenizer."""
    from swarm_models.checkpoints.gguf.tokenizer import read_tokenizer

    try:
        return dict(read_tokenizer(location).get_vocab())
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None
