"""The process: its command line, network loop, temporary files, registry entry, logs, and end."""
