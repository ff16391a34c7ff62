"""Opening and writing table files."""
