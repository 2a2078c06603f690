"""Hugging Face models whose blocks are remote. Import ``model``."""
