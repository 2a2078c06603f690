"""Readers with limits for untrusted data: JSON, numbers of configs, regular expressions."""
