"""Floor 1: processes, groups, collectives and random-number streams."""
