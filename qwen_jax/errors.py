"""The errors that callers may catch.

Each message says what was wrong, the value seen, what is accepted, and what to do.
"""


class ConfigError(ValueError):
    """A model configuration that is malformed, or that this project does not implement."""


class CheckpointError(ValueError):
    """A model folder whose files are missing, damaged, unsafe, or do not fit the configuration."""


class RequestError(ValueError):
    """A prompt, sampling option or limit outside what is accepted."""


class CacheFullError(RuntimeError):
    """The block cache has no free block, or a sequence has no free entry in its block table."""


class MemoryLimitError(RuntimeError):
    """A model or cache that cannot fit in the memory at hand; raised before anything is loaded."""
