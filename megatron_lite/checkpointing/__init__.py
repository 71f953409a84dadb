"""Floor 4: saving and loading training state as safetensors and JSON."""
