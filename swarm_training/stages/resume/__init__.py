"""The start of a run in stages from the disks of its peers, after all of them have ended."""
