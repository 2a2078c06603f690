"""The generation of text: tokenizers, streaming, and the options of ``generate``."""
