"""Hosts experts: computes and trains them, puts requests together, announces, saves and adopts them."""
