"""The life cycle of a server: joining, hosting a span, moving, draining. Import ``server``."""
