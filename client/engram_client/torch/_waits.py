"""How long forwards waited for rows: what an operator wants to know of a memory that is not resident."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest, start_http_server

_BUCKETS_S = (
    *(0.00001, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
)
"""The first holds waits for rows that were there already; decode steps take milliseconds, prefills up to seconds."""


class WaitTimes:
    """A histogram per layer, in Prometheus form: engram_client_wait_seconds{layer="1"}. Safe to share between threads.

    A wait that fails counts too. Metrics go to a registry of their own, or to the one given.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Raises ValueError when the registry has these metrics already."""
        self.registry = registry or CollectorRegistry()
        self._seconds = Histogram(
            "engram_client_wait_seconds",
            "Seconds that a forward waited for the Engram rows of a layer.",
            ["layer"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )

    def observe(self, layer: int, seconds: float) -> None:
        """Count one wait."""
        self._seconds.labels(str(layer)).observe(seconds)

    def exposition(self) -> bytes:
        """All metrics of the registry in Prometheus' text form."""
        return generate_latest(self.registry)

    def start_http_server(self, port: int, host: str = "127.0.0.1") -> int:
        """Serve them at http://host:port/metrics, from a thread, until the process ends; port 0 takes a free one.

        Returns the port. Raises OSError when it is taken.
        """
        server, _ = start_http_server(port, host, registry=self.registry)
        return server.server_port
