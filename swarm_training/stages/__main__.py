"""The entry point of ``python -m swarm_training.stages``."""

import sys

from swarm_training.stages.command_line import main

main(sys.argv[1:])
