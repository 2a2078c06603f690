"""The command ``swarm quantize``: it rounds a checkpoint to 4 bits by the inputs that a text gives its layers."""
