"""A Megatron-style tensor-parallel GPT training engine. Start reading at pretrain_gpt.py, then
training/loop.py."""
