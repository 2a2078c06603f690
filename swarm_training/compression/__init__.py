"""Fewer bytes for gradients: codecs, error feedback and low-rank compression."""
