"""The generated code is that of the contract in `protos/`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    command = ["-m", "grpc_tools.protoc", "-Iswarm_protocol/pb=protos", *outputs, "swarm_protocol/pb/swarm.proto"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    generated = {path.name: path.read_bytes() for path in (tmp_path / "swarm_protocol" / "pb").iterdir()}
    assert generated.keys() == {"swarm_pb2.py", "swarm_pb2.pyi"}
    outdated = [
        name for name, code in generated.items() if (ROOT / "swarm_protocol" / "pb" / name).read_bytes() != code
    ]
    assert not outdated, f"{', '.join(outdated)} differ from protos/swarm.proto: run `make proto`"
