"""Which sessions get room for their keys and values, and which give it back."""
