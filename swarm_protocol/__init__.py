"""The code that every peer of a swarm must agree on: bytes on the wire, records in the DHT, names in a checkpoint."""

import os
import sys

# Set before grpc is imported: its fork handlers complain about the start of the libp2p daemon (fork + exec),
# and can make this start hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # failures reach the user through this library's own errors
# Set before hivemind is imported. Otherwise hivemind makes torch share tensors through a process that may be slow.
if sys.platform == "linux":  # torch knows no other way elsewhere
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
