"""Client of engram-server."""
