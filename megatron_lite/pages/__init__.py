"""Self-contained HTML pages: one file each, without scripts, network or external fonts."""
