"""Native kernels of engram-server: hash, reader, engine and dequantisation."""
