"""The construction of the compressor and the encoder from the averaging settings."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_training.compression.codecs import codec_of
from swarm_training.compression.compressor import Compressor, Plain
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.compression.settings import AveragingSettings


def build_compressor(settings: AveragingSettings, shapes: Sequence[Sequence[int]], run: str) -> Compressor:
    """Return the compressor. ``shapes``: the shapes of the trained parameters, in order; ``run``: the run's name."""
    return PowerSGD(shapes, settings.power_sgd_rank, run) if settings.power_sgd_rank else Plain()


def build_encoder(settings: AveragingSettings) -> ErrorFeedback | None:
    return ErrorFeedback(codec_of(settings.codec)) if settings.error_feedback else None
