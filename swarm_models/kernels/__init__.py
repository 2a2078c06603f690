"""Linear layers with int8 and int4 weights, multiplied by C++ code that is compiled at installation, or by torch."""
