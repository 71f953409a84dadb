"""The answers to Megatron flags that set no field of a config.

Such a flag has no effect, allows one value only, is an old spelling, or is refused. `arguments.py`
adds the supported flags and takes all other answers from the tables of this module. The long table
of refused flags, with the reasons, is in `megatron_flags.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from megatron_lite.config.megatron_flags import REFUSED_FAMILIES

# Flags that are accepted and ignored: the run is the same without them. A word after the flag
# means that it takes a value. The text gives the reason.
WITHOUT_EFFECT = {
    "--use-mcore-models": "there is one model implementation",
    "--transformer-impl NAME": "there is one layer implementation",
    "--use-flash-attn": "--attention-backend chooses, and auto takes flash attention where it runs",
    "--no-masked-softmax-fusion": "the attention softmax is chosen by --attention-backend",
    "--no-bias-swiglu-fusion": "swiglu is computed in one way",
    "--no-bias-dropout-fusion": "bias and dropout are computed in one way",
    "--no-rope-fusion": "rotary embeddings are computed in one way",
    "--no-persist-layer-norm": "norms are computed in one way",
    "--disable-jit-fuser": "nothing is compiled at run time",
    "--cross-entropy-loss-fusion": (
        "the loss is always computed from the vocabulary shards, without gathering the logits"
    ),
    "--cross-entropy-fusion-impl NAME": "there is one cross-entropy",
    "--apply-query-key-layer-scaling": (
        "it only keeps float16 scores in range, which are scaled before they are rounded"
    ),
    "--accumulate-allreduce-grads-in-fp32": "gradients are always accumulated in float32, and "
    "reduced so without "
    "--grad-reduce-in-bf16",
    "--fsdp-reshard-after-forward": "a layer's weights are freed after its forward, unless by "
    "--torch-fsdp2-no-reshard-after-forward",
    "--use-cpu-initialization": (
        "initial weights are always drawn on the CPU, the same for every device"
    ),
    "--disable-gloo-process-groups": (
        "one backend serves all process groups (--distributed-backend)"
    ),
    "--te-rng-tracker": "random numbers come from the named streams of this program",
    "--inference-rng-tracker": "random numbers come from the named streams of this program",
    "--manual-gc": "garbage collection is left to Python",
    "--manual-gc-interval N": "garbage collection is left to Python",
    "--no-manual-gc-eval": "garbage collection is left to Python",
    "--disable-manual-gc-eval": "garbage collection is left to Python",
    "--empty-unused-memory-level N": "unused memory stays with the allocator",
    "--num-workers N": "batches are read in the training process",
    "--num-dataset-builder-threads N": "the sample index is built by one thread",
    "--no-mmap-bin-files": "how the file is read does not change what is read",
    "--data-impl NAME": "there is one dataset format, .bin/.idx",
    "--no-create-attention-mask-in-dataloader": "attention masks are never made by the data loader",
    "--trust-remote-code": "tokenizer files are data, and no code in them is run",
    "--no-use-tokenizer-model-from-checkpoint-args": "the tokenizer is always the one of the flags",
    "--disable-use-tokenizer-model-from-checkpoint-args": (
        "the tokenizer is always the one of the flags"
    ),
    "--ckpt-format NAME": "checkpoints have one format, safetensors and JSON",
    "--dist-ckpt-format NAME": "checkpoints have one format, safetensors and JSON",
    "--use-dist-ckpt": "every checkpoint is written by all ranks",
    "--auto-detect-ckpt-format": "checkpoints have one format, safetensors and JSON",
    "--ckpt-fully-parallel-save": "how ranks share the writing does not change the checkpoint",
    "--no-ckpt-fully-parallel-save": "how ranks share the writing does not change the checkpoint",
    "--ckpt-fully-parallel-load": "how ranks share the reading does not change what is read",
    "--ckpt-assume-constant-structure": "nothing about a checkpoint's structure is cached",
    "--dist-ckpt-workers N": "how ranks share the writing does not change the checkpoint",
    "--dist-ckpt-strictness NAME": "a missing or unexpected tensor is always an error",
    "--verify-integrity": "every checkpoint that is loaded is compared with its checksums",
    "--dist-ckpt-optim-fully-reshardable": "every checkpoint loads at every tensor-parallel size",
    "--exit-on-missing-checkpoint": (
        "a missing checkpoint is an error unless --allow-fresh-start is given"
    ),
    "--override-opt_param-scheduler": "the learning rate always follows the flags",
    "--override-opt-param-scheduler": "the learning rate always follows the flags",
    "--timing-log-level N": "there is one level of timing",
    "--timing-log-option NAME": "there is one level of timing",
    "--no-barrier-with-level-1-timing": "timing adds no barriers",
    "--tensorboard-queue-size N": "TensorBoard buffers as it likes",
    "--logging-level N": "there is one level of logging",
    "--no-one-logger": "there is no one-logger",
    "--enable-experimental": "it only unlocks features that are not here",
    "--DDP-impl NAME": "there is one data-parallel implementation",
    "--no-contiguous-buffers-in-local-ddp": "there is one data-parallel implementation",
    "--no-async-tensor-model-parallel-allreduce": (
        "it changes when a reduction runs, not its result"
    ),
    "--no-query-key-layer-scaling": "scores are never scaled by the layer number",
}

# Flags that allow only this value, which is what the program does anyway. Any other is refused.
ONLY_VALUE = {
    "--expert-model-parallel-size": "1",
    "--expert-tensor-parallel-size": "1",
    "--num-distributed-optimizer-instances": "1",
    "--softmax-type": "vanilla",
    "--cuda-graph-impl": "none",
    "--weight-decay-incr-style": "constant",
    "--muon-scalar-optimizer": "adam",
    "--rerun-mode": "disabled",
}

# Old spellings, with the flags that replace them.
RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--layernorm-epsilon": "--norm-epsilon",
    "--no-fsdp-reshard-after-forward": "--torch-fsdp2-no-reshard-after-forward",
    "--checkpoint-activations": "--recompute-granularity full --recompute-method uniform",
    "--activations-checkpoint-method": "--recompute-granularity full --recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
}


def refusal_reason(name: str) -> str | None:
    """Returns why a flag of Megatron is refused, with the nearest setting that works.

    Returns None for a flag that Megatron does not have.
    """
    return next(
        (reason for reason, names in REFUSED_FAMILIES if name.removeprefix("--") in names.split()),
        None,
    )


def refused_flags() -> list[str]:
    """Returns all flags that are refused by name."""
    return [f"--{name}" for _, names in REFUSED_FAMILIES for name in names.split()]


def closest_flag(name: str, supported: Iterable[str]) -> str | None:
    """Returns the known flag whose spelling is nearest to `name`, or None if none is near.

    The order is: supported flags with a close spelling, other flags of Megatron, and last the
    supported flags with a loosely similar spelling.
    """
    supported = list(supported)
    others = [*(entry.partition(" ")[0] for entry in WITHOUT_EFFECT), *refused_flags()]
    for known, cutoff in ((supported, 0.75), (others, 0.8), (supported, 0.62)):
        if matches := difflib.get_close_matches(name, known, n=1, cutoff=cutoff):
            return matches[0]
    return None
