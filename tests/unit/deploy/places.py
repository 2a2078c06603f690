"""Where the files of deployment are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
