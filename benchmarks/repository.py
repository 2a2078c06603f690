"""Makes the tools of the tests importable for benchmarks, which are run as scripts."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
