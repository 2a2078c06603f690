"""Compression-aware layers: modules at the boundary of two stages, through which few numbers travel."""
