"""What importing torch, transformers and hivemind costs a server: what it never uses waits until somebody does."""
