"""What blocks do that cannot be repeated in backward."""


class BlockError(ValueError):
    """A block does it; the message names the block and a cure."""
