"""Linear layers on GPUs: weights in int8, and the kernel for products with few rows."""
