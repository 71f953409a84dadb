"""Weights of other programs, in and out: Hugging Face, Megatron-LM and this project's checkpoints."""
