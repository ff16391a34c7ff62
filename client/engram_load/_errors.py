"""What can be wrong with a load test."""

from __future__ import annotations


class LoadError(ValueError):
    """A load test that cannot be run, or whose result means nothing. The text is a sentence."""
