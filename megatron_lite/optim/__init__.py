"""Floor 2: gradient buffers, clipping, update rules, learning-rate schedules."""
