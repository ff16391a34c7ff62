"""How a command of a program ends: its exit status, and a sentence where an operator can mend what went wrong."""

from __future__ import annotations

import argparse
import logging
import sys

log = logging.getLogger("engram_server")


def run_command(program: str, options: argparse.Namespace) -> int:
    """Call `options.run`. Returns its exit status; 1 after a sentence on stderr or in a JSON log, 130 after Ctrl-C.

    Raises what is our own bug.
    """
    try:
        status: int = options.run(options)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; so do we, quietly
        return 1
    except Exception as error:
        if not is_operators(error):
            raise
        if getattr(options, "log_format", "text") == "json":
            log.critical("%s", sentence_of(error))
        else:
            print(f"{program} {options.command}: {sentence_of(error)}", file=sys.stderr)
        return 1


def is_operators(error: Exception) -> bool:
    """Whether an error is about files, hosts or input, and so deserves a sentence; else it is our bug."""
    from engram_client import EngramError
    from engram_server.sockets import ServeError

    # RuntimeError itself, no subclass: what the native core raises when a backend cannot run here.
    return isinstance(error, OSError | ValueError | EngramError | ServeError) or type(error) is RuntimeError


def sentence_of(error: Exception) -> str:
    """What such an error says to an operator."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
