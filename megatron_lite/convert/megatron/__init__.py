"""Weights and optimizer states of Megatron-LM's checkpoints, read without running their code."""
