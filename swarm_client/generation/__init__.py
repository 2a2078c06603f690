"""Text: tokenizers, streaming, and the options of ``generate``."""
