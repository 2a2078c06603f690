"""Linear layers on GPUs: weights in int8, with the kernel for products with few rows, and in FP8."""
