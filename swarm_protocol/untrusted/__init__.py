"""What strangers wrote, read within limits: JSON, numbers of configs, regular expressions."""
