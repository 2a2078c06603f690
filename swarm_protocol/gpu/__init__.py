"""Linear layers on GPUs: weights in int8, and the kernel that few rows are multiplied by."""
