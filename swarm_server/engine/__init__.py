"""Computation of session steps in batches. Import ``engine`` and ``scheduler``."""
