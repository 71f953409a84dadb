"""Floor 3: arithmetic of bytes and FLOPs. No torch."""
