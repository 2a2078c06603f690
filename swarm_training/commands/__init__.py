"""The commands of ``swarm train``: a run file, joining a run, watching it, moderating it."""
