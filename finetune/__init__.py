"""Examples in, adapter out."""
