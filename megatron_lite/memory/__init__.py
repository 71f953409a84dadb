"""Floor 3: bytes and FLOPs: predicted (no torch), measured, and explained."""
