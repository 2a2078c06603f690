"""The check that a model can be loaded on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from swarm_cli.doctor.check import DoctorCheck, Finding, failed, ok, warning
from swarm_client.core.config import ClientConfig
from swarm_models.checkpoints.default_model import FROM_SWARM, locate
from swarm_protocol.errors import SwarmError

_HUB_S = 60.0  # importing transformers, and asking the hub
_OFFLINE = "HF_HUB_OFFLINE"


def model_checks(model: str, revision: str | None, config: ClientConfig) -> list[DoctorCheck]:
    """Return the checks. ``config`` says how to join the swarm if its members have the model's files."""
    return [DoctorCheck("hub", _hub), DoctorCheck("model", lambda: _model(model, revision, config), _HUB_S)]


def _hub() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        found = f"{_OFFLINE} is {os.environ.get(_OFFLINE, 'set')}: only models that are here already can be loaded"
        yield warning("hub", found, f"unset {_OFFLINE} to download others")
    else:
        yield ok("hub", "models are downloaded when they are not here")


def _model(model: str, revision: str | None, config: ClientConfig) -> Iterator[Finding]:
    from swarm_client.generation.opening import tokenizer_at
    from swarm_client.weights.opening import ModelOpening

    try:
        with closing(ModelOpening(config)) as opening:
            checkpoint = opening.open(model, revision)
            family = checkpoint.family
            tokenizer = tokenizer_at(checkpoint.location, checkpoint.revision)
    except SwarmError as error:
        if model.startswith(FROM_SWARM):
            to_do = "check the name, and --initial-peers: members of that swarm send the files"
        elif Path(locate(model)).is_dir():
            to_do = "check the directory"
        else:
            to_do = "check its name and the network; HF_TOKEN is for gated models"
        yield failed("model", str(error), to_do)
        return
    template = "a chat template" if tokenizer.chat_template else "no chat template"
    yield ok("model", f"{model} can be loaded: {checkpoint.config.model_type}, {family.num_blocks} blocks, {template}")
