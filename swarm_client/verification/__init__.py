"""Checks of servers: other servers compute some answers again, and servers that answered wrongly are left out."""
