"""Floor 3: bytes and FLOPs: in closed form (no torch), measured, and as pictures."""
