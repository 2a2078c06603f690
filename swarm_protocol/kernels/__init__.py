"""Linear layers with int8 weights: multiplied by C++ that is compiled at installation, or by torch."""
