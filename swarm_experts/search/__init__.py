"""Decides, and does nothing else: which experts a row goes to, whose turn it is, who takes a cell or keeps replicas."""
