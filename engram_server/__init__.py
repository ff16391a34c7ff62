"""engram-server: serves Engram table rows from NVMe."""
