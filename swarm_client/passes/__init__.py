"""Forward and backward passes without a cache, and their retries. Import ``passes``."""
