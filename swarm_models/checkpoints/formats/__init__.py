"""Formats in which published checkpoints pack weights: one module per format, selected by ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarm_models.checkpoints.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from swarm_models.checkpoints.formats.packed import PackedForm
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import shown

FORMATS: dict[str, Callable[[Mapping[str, Any]], tuple[PackedForm, ...]]] = {
    "awq": awq.forms,
    "bitsandbytes": bitsandbytes.forms,
    "compressed-tensors": compressed_tensors.forms,
    "fp8": fp8.forms,
    "gptq": gptq.forms,
    "mxfp4": mxfp4.forms,
}


def forms_of(quantization_config: object, where: str) -> tuple[PackedForm, ...]:
    """Return the forms in which this checkpoint packs its weights.

    Raises:
        CheckpointError: the format is not known, or the config does not fit it.
    """
    method = quantization_config.get("quant_method") if isinstance(quantization_config, dict) else None
    if not isinstance(quantization_config, dict) or not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{where} is stored quantised as {shown(method)}, which is not known: expected one of "
            f"{', '.join(sorted(FORMATS))}, or the model's unquantised checkpoint"
        )
    try:
        return FORMATS[method](quantization_config)
    except CheckpointError as error:
        raise CheckpointError(f"{where} cannot be read as {method}: {error}") from None
