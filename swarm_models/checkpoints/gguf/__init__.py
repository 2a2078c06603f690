"""Models in GGUF form: one or more files with config, names, tokenizer and weights."""
