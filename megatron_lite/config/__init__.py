"""Floor 0: frozen configuration values and their rules. Standard library only."""
