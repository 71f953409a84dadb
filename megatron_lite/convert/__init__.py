"""Floor 5: weights of Hugging Face, Megatron-LM and this project, in and out."""
