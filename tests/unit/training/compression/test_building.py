"""The settings of averaging, and what there is to compress."""

from __future__ import annotations

from swarm_training.compression.codecs import CODEC_NAMES
from swarm_training.compression.settings import CODECS, AveragingSettings
from swarm_training.core.config import TrainingConfig


def test_the_settings_have_the_codecs_that_there_are() -> None:
    assert (*CODECS, "fp64") == CODEC_NAMES and AveragingSettings().codec == TrainingConfig().codec
