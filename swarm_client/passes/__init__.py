"""Forward and backward passes without a cache, retried until they are answered. Import ``passes``."""
