"""Elements of tensors in fewer bytes: bfloat16, blocks of int8, blocks of 4 bits; and sets of numbers as bits."""
