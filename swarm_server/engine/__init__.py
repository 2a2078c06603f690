"""Batches what sessions ask for and computes it. Import ``engine`` and ``scheduler``."""
