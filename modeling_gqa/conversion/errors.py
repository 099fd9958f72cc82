"""What the user can put right."""


class ConversionError(ValueError):
    """A checkpoint, field or size that cannot be imported, exported or converted; its message is one line."""
