"""engram-load: what a drive, a layout or a cache does to lookups, measured as an engine would feel it.

    engram-load prefill 127.0.0.1:50051 docs/ --rate 20 --duration 30

    _corpus, _patterns   what is asked for: jobs of one or more requests
    _target              who is asked: a server over gRPC or shared memory, or a path in this process
    _run, _measure       when it is asked, and what came of it
    _sweep               the same for several values of a parameter
    _document, _html     the report; _compare for two of them
    _access, _analyze    what a recorded trace asked for, and what a cache would have made of it

docs/load.md explains it to its users.
"""
