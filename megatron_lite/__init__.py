"""A Megatron-style tensor-parallel GPT training engine. Start reading at pretrain_gpt.py, then
training/loop.py. megatron_lite.api has the functions for your own scripts."""

__version__ = "0.1.0"
