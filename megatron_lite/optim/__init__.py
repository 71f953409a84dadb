"""Floor 2: gradient buffers, clipping, AdamW, learning-rate schedules."""
