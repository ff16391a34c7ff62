"""engram-server: serves Engram table rows from NVMe."""

__version__ = "0.1.0"
