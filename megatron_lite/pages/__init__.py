"""Self-contained HTML pages: one file each, without network, external scripts or fonts."""
