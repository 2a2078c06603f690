"""How elements of tensors are written in fewer bytes: bfloat16, blocks of int8, blocks of 4 bits."""
