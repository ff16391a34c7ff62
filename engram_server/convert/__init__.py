"""Rewriting tables: checkpoint or DSV41EN1 shards in, packed store or DSV41EN1 shards out.

`command.convert` does it all; the steps are one module each: where rows come from (source), where they go (target),
the unfinished file and its journal (partial), the threads between them (pipeline), reading back (compare).
"""

from engram_server.convert.command import ConvertOptions, ConvertResult, convert

__all__ = ["ConvertOptions", "ConvertResult", "convert"]
