"""`engram-server doctor`: what this machine does for reads, found by the probes the server itself uses."""

from engram_server.doctor.report import Report, examine, format_report, run

__all__ = ["Report", "examine", "format_report", "run"]
