"""The command-line flags with which clients and servers join a private swarm."""

from __future__ import annotations

from swarm_protocol.config_flags import Flag
from swarm_protocol.process.config_file import ConfigRules

ENVIRONMENT = "SWARM_MEMBERSHIP"  # holds the content of a membership file
CONFIG_RULES = ConfigRules(environment={"membership": ENVIRONMENT})
MEMBERSHIP = Flag(
    "membership",
    f"of a private swarm, from its organiser; or the environment variable {ENVIRONMENT} has its content",
    metavar="FILE",
)
SWARM_KEY = Flag(
    "swarm_key",
    "only members of this organiser's swarm are taken for servers; a membership says it as well",
    metavar="PUBLIC",
)
