"""The entry point of ``python -m swarm_stages``."""

import sys

from swarm_stages.command_line import main

main(sys.argv[1:])
