"""The reachability of this server: its addresses, as they change, and relays if peers do not reach it directly."""
