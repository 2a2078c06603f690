"""A server's life: joining, hosting a span, moving, draining. Import ``server``."""
