"""The compression of gradients: codecs, error feedback and low-rank factors."""
