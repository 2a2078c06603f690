"""Forward and backward passes without a cache, and the activations kept between them."""
