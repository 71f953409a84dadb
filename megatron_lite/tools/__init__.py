"""Floor 6: command-line tools, each run as python -m megatron_lite.tools.NAME."""
