"""How others reach this server: its addresses, as they change, and relays if nobody reaches it directly."""
