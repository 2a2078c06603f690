"""The command ``swarm train ledger``, which shows who has contributed how much, from signed rounds alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.wire.printable import printable
from swarm_training.ledger.archive import read_rounds
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.runfile.settings import RunFile

_logger = logging.getLogger(__name__)


def ledger_in_file(path: Path, file: RunFile) -> Ledger:
    """Return the ledger of a file's valid rounds of this run. Raises ValueError if the file is no ledger."""
    organiser = SwarmKey.parse(file.tokens.organiser) if file.tokens.organiser else None
    ledger = Ledger(file.run.name, LedgerLimits.of(file.run.target_batch_size, file.averaging.max_samples), organiser)
    for data in read_rounds(path, file.run.name):
        try:
            ledger.add(data)
        except ValueError as error:
            _logger.warning("a round is left out: %s", printable(str(error)))
    return ledger


def facts_of(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger's totals as values for JSON. ``share``: the share of all samples, from 0 to 1."""
    totals = ledger.totals()
    samples = sum(total.samples for total in totals.values())
    users = [
        {"user": user, "samples": total.samples, "share": total.samples / samples, "rounds": total.rounds}
        for user, total in totals.items()
    ]
    return {"run": ledger.run, "samples": samples, "rounds": ledger.num_rounds, "users": users}


def show(ledger: Ledger, *, as_json: bool) -> None:
    facts = facts_of(ledger)
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("user")
    for title in ("samples", "share", "rounds"):
        table.add_column(title, justify="right")
    for user in facts["users"]:
        name = Text(printable(user["user"]))
        table.add_row(name, str(user["samples"]), f"{user['share']:.1%}", str(user["rounds"]))
    console = Console()
    console.print(Text(f"run {facts['run']}: {facts['samples']} samples in {facts['rounds']} rounds", "bold"))
    console.print(table)
