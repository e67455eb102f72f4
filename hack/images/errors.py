"""What stops a build: one sentence for a person."""


class ImageError(Exception):
    """An image cannot be built or pushed. `str()` names what is wrong and what to do; no traceback follows it."""
