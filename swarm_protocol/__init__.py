"""What every peer of a swarm must agree on: bytes on the wire, records in the DHT, names in a checkpoint."""

import os

# Before grpc is imported: its fork handlers complain about, and can hang, the start of the libp2p daemon (fork + exec).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # failures reach the user through our own errors
# Before hivemind is imported, which else has torch share tensors through a process that may answer too late.
os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
