"""How a process is called, what it leaves behind and how it ends: command names, scratch directories and signals."""
