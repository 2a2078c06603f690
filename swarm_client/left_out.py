"""What a stock model has from its blocks, or does in them, and servers do not: refused where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from swarm_protocol.errors import RequestRejected


def wants(what: str, given: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether a forward with the arguments ``given`` is to return ``what``."""
    wanted = given.get(what)
    return bool(getattr(config, what, False) if wanted is None else wanted)


def refuse_inner_outputs(given: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raises RequestRejected if a forward of a base model with these arguments is to return what is inside blocks."""
    if wants("output_attentions", given, config):
        raise RequestRejected(
            "output_attentions=True asks for attention weights, which stay on the servers: leave it out (hidden "
            "states can be had, with output_hidden_states=True)"
        )
    if given.get("output_router_logits"):
        raise RequestRejected(
            "output_router_logits=True asks for what the routers of experts return, which stays on the servers: set "
            "output_router_logits=False, or leave it out"
        )


def without_router_logits(names: Sequence[str], given: dict[str, Any], config: PreTrainedConfig) -> dict:
    """Arguments that keep a stock ``forward`` from asking for router logits because its config says so.

    Args:
        names: of the arguments that ``forward``, of the model with its head, can take.
        given: those of this call.

    Raises:
        RequestRejected: it would add the auxiliary loss of the routers to that of ``labels``.
    """
    is_given = given.get("output_router_logits") is not None
    if is_given or "output_router_logits" not in names or not getattr(config, "output_router_logits", False):
        return {}
    if given.get("labels") is not None:
        raise RequestRejected(
            "config.output_router_logits=True adds the routers' auxiliary loss to that of labels, but what routers "
            "return stays on the servers: set output_router_logits=False (as an argument here or of from_pretrained, "
            "or model.config.output_router_logits=False), and the loss is without it"
        )
    return {"output_router_logits": False}
