"""What a process leaves behind and how it ends: scratch directories and signals."""
