"""How a Hugging Face checkpoint is read, and how its model splits into blocks."""
