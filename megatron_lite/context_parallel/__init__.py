"""Floor 2: attention over sequences that are sharded over context-parallel ranks."""
