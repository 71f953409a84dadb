"""Floor 2: attention over sequences that context-parallel ranks share."""
