"""The command ``swarm doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys

from swarm_cli.commands.flags import Command, Commands, add_swarm_flags, swarm_config
from swarm_client.generation.opening import check_model_name
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command
from swarm_protocol.process.scratch import remove_scratch

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}


def add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        doctor_command,
        help="find problems of this machine, its servers and the way to the swarm",
        description="Exit code 1 if something is marked ✗. Findings marked ! may be intended.",
    )
    add_swarm_flags(parser)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH", help="model to load here, or swarm://NAME"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--host", metavar="ADDRESS", help="address for a server to listen on; by default any")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port for a server to listen on; 0: any free port"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor_command(args: argparse.Namespace) -> Command:
    check_model_name(args.model, args.revision)
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port is {args.port}: expected 0 to 65535")
    config = swarm_config(args)

    def run() -> None:
        from swarm_cli.doctor.check import DoctorCheck, Finding, Grade, findings_of
        from swarm_cli.doctor.machine import machine_checks
        from swarm_cli.doctor.platform import platform_checks
        from swarm_cli.doctor.software import software_checks

        signals.unwind_on_signals()

        def checks() -> list[DoctorCheck]:
            from swarm_cli.doctor.members import swarm_checks
            from swarm_cli.doctor.model_files import model_checks

            return [*model_checks(args.model, args.revision, config), *swarm_checks(config)]

        found: list[Finding] = []
        for part in (software_checks, platform_checks, lambda: machine_checks(args.host, args.port), checks):
            for finding in findings_of(part()):
                found.append(finding)
                if not args.json:
                    _show(finding.subject, finding.grade, finding.found, finding.to_do)
        is_well = all(finding.grade != Grade.FAILED for finding in found)
        if args.json:
            print(json.dumps({"ok": is_well, "checks": [vars(finding) for finding in found]}, indent=2))
        sys.stdout.flush()
        remove_scratch()
        os._exit(0 if is_well else 1)  # a check that hangs must not keep the process alive

    return run


def _show(subject: str, grade: str, found: str, to_do: str) -> None:
    from rich.console import Console
    from rich.text import Text

    mark, color = _MARKS[grade]
    line = Text.assemble((mark, f"bold {color}"), " ", (subject, "bold"), f": {found}")
    if to_do:
        line.append(f"\n  → {to_do}")
    Console(highlight=False).print(line, soft_wrap=True)
