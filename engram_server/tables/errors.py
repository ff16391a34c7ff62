"""The errors of everything that opens, writes or watches tables."""


class TableError(ValueError):
    """Table files that cannot be served or written. The text is a sentence: what, where, what to do."""


class TableChangedError(Exception):
    """A table file was written to while it was open. The text is a sentence."""
