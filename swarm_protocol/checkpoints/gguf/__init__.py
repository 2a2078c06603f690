"""Models in one GGUF file, or several: config, names, tokenizer and weights are all in it."""
