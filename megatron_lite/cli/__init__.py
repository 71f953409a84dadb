"""Floor 6: the dry run of pretrain_gpt.py, its start, and the exit status of each error."""
