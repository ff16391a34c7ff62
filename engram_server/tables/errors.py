"""The error of everything that opens or writes tables."""


class TableError(ValueError):
    """Table files that cannot be served or written. The text is a sentence: what, where, what to do."""
