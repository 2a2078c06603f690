"""What distance costs: links of so many Mbit/s and ms between hosts that are network namespaces.

    python benchmarks/network.py [--only SECTION …] [--links LINK …] [--model DIR] [--quick] [--json FILE]

Section ``loss``: that of the shipped model on its held-out text, by codec. Section ``bytes``: bytes per token and
tokens per second, by link and codec. Section ``reach``: round trips through a relay beside direct ones, on loopback.
Makes its namespaces itself and removes them; needs root, iproute2, /dev/net/tun and a C compiler, and says so if one is
missing. A link's ms are a round trip between any two hosts. ``--quick`` shows with the shipped model that it works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import network_bytes
import network_reach
from common import has_lab, table_of, write_json
from network_lab import Link
from rich.console import Console

LINKS = {
    "1 Gbit, 5 ms": Link(delay_ms=2.5, mbit=1000),
    "100 Mbit, 5 ms": Link(delay_ms=2.5, mbit=100),
    "100 Mbit, 100 ms": Link(delay_ms=50, mbit=100),
    "10 Mbit, 100 ms": Link(delay_ms=50, mbit=10),
}
Section = Callable[[argparse.Namespace, dict[str, Link], Console], list[dict[str, Any]]]
SECTIONS: dict[str, Section] = {
    "loss": network_bytes.losses,
    "bytes": network_bytes.measure,
    "reach": network_reach.measure,
}


def main() -> int:
    args = parse()
    console = Console(width=150, highlight=False)
    if not has_lab(args.json, vars(args)):
        return 0
    rows: list[dict[str, Any]] = []
    links = {name: link for name, link in LINKS.items() if name in args.links}
    for section in args.only:
        rows += SECTIONS[section](args, links, console)
        if args.json:
            write_json(args.json, vars(args), rows=rows)
    console.print(table_of(rows))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS), metavar="LINK", help=", ".join(LINKS))
    parser.add_argument("--model", type=Path, default=Path("bench-models/bench-1b"), help="made by make_model.py")
    parser.add_argument("--codecs", nargs="+", default=["raw", "bf16", "int8", "int4", "auto"], metavar="CODEC")
    parser.add_argument("--rows", type=int, default=0, help="of the long step; 0: as many as take Petals' 0.585 s")
    parser.add_argument(
        "--sysctl",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the hosts of --only bytes, such as net.ipv4.tcp_slow_start_after_idle=0",
    )
    parser.add_argument("--quick", action="store_true", help="the shipped model, two codecs, few tokens")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
