"""``python -m swarm_training.experts`` with records that last for three seconds: tests wait less for dead servers."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_training.experts import ExpertServerConfig, command_line


@dataclass(frozen=True)
class BriefConfig(ExpertServerConfig):
    lifetime_s: float = 3.0


if __name__ == "__main__":
    command_line.ExpertServerConfig = BriefConfig  # type: ignore[misc]
    command_line.main()
