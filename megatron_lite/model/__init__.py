"""Floor 3: the GPT model, with Megatron's parameter names."""
