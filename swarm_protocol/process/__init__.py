"""How a process is called, its network loop, what it leaves behind and how it ends."""
