"""The command ``swarm train ledger``, which shows who has contributed how much, from signed rounds alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.wire.printable import printable
from swarm_training.commands.watching import as_json as view_as_json
from swarm_training.commands.watching import held_out_line, title_line
from swarm_training.contract.views import RunView
from swarm_training.ledger.archive import restored
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.runfile.settings import RunFile


def ledger_in_file(path: Path, file: RunFile) -> Ledger:
    """Return the ledger of a file's valid rounds of this run. Raises ValueError if the file is no ledger."""
    organiser = SwarmKey.parse(file.tokens.organiser) if file.tokens.organiser else None
    limits = LedgerLimits.of(file.run.target_batch_size, file.averaging.max_samples)
    return restored(path, file.run.name, limits, organiser, is_own=False)


def facts_of(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger's totals as values for JSON. ``share``: the share of all samples, from 0 to 1."""
    totals = ledger.totals()
    samples = sum(total.samples for total in totals.values())
    users = [
        {"user": user, "samples": total.samples, "share": total.samples / samples, "rounds": total.rounds}
        for user, total in totals.items()
    ]
    return {"run": ledger.run, "samples": samples, "rounds": ledger.num_rounds, "users": users}


def facts_of_view(view: RunView) -> dict[str, Any]:
    """Return the step and the losses of a view as values for JSON."""
    facts = view_as_json(view)
    return {name: facts[name] for name in ("step", "loss", "held_out", "best_held_out")}


def show(ledgers: Sequence[Ledger], view: RunView | None, *, as_json: bool) -> None:
    """Print the ledger of a run, or those of all stages of a run in stages, whose samples are micro-batches. ``view``:
    the run as its peers see it now; None: only ledgers are here."""
    facts = [facts_of(ledger) for ledger in ledgers]
    is_staged = view is not None and bool(view.stages)
    if as_json:
        whole = {"run": view.run, "stages": facts} if view is not None and is_staged else facts[0]
        print(json.dumps(whole if view is None else {**whole, **facts_of_view(view)}))
        return
    console = Console()
    if view is not None:
        console.print(Text(title_line(view), "bold"))
        if view.held_out is not None:
            console.print(Text(held_out_line(view)))
    for stage, each in enumerate(facts):
        whose, what = (f"stage {stage}", "micro-batches") if is_staged else (f"run {printable(each['run'])}", "samples")
        console.print(Text(f"{whose}: {each['samples']} {what} in {each['rounds']} rounds", "bold"))
        console.print(_table(each, what))


def _table(facts: Mapping[str, Any], what: str) -> Table:
    table = Table("user")
    for title in (what, "share", "rounds"):
        table.add_column(title, justify="right")
    for user in facts["users"]:
        name = Text(printable(user["user"]))
        table.add_row(name, str(user["samples"]), f"{user['share']:.1%}", str(user["rounds"]))
    return table
