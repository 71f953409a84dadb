"""The names of the formats of weights, each with a line for --help. Standard library only.

formats.py has how each is read and written, for which it imports torch.
"""

from __future__ import annotations

HF, NATIVE, MEGATRON, MEGATRON_DIST = "hf", "megatron-lite", "megatron", "megatron-dist"
FORMAT_HELP = {
    HF: "a folder of Hugging Face: config.json, safetensors, tokenizer",
    NATIVE: "a checkpoint directory, the --save of a training run",
    MEGATRON: "a checkpoint of Megatron-LM with --ckpt-format torch",
    MEGATRON_DIST: "a checkpoint of Megatron-LM with --ckpt-format torch_dist",
}
