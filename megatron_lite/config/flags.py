"""The answers to Megatron flags that set no field of a config.

Such a flag has no effect, allows one value only, is an old spelling, or is refused. The parser in
`cli/arguments/` adds the supported flags and takes all other answers from the tables of this
module. The long tables have modules of their own:

    megatron_flags    the refused flags, with the reasons
    ignored_flags     flags without effect on results, by the reason
    detail_flags      settings of features that are not built
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from megatron_lite.config.detail_flags import DETAILS
from megatron_lite.config.ignored_flags import IGNORED_FAMILIES
from megatron_lite.config.megatron_flags import REFUSED_FAMILIES

# With more ignored flags than this, one line names all of them, without the reasons.
MOST_REASONS = 3

# Flags of version 0.1 that are accepted without effect in version 0.2, and refused afterwards.
RETIRED = {
    "--no-onednn-matmuls": "torch computes every matrix product and attention on every processor",
    "--no-shared-memory-collectives": "CPU ranks of one host send through gloo",
}
# The fields that they set, which configurations stored by version 0.1 have.
RETIRED_FIELDS = frozenset(("onednn_matmuls", "shared_memory_collectives"))

# Flags that are accepted and ignored: the run is the same without them. A word after the flag
# means that it takes a value. The text gives the reason. Reasons that many flags share are in
# `ignored_flags.py`.
WITHOUT_EFFECT = {
    **RETIRED,
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
    "--cpu-offloading-retain-pinned-cpu-buffers": "buffers in host memory are always used again",
    "--min-offloaded-tensor-size N": "what a named module saves is moved, whatever its size",
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
    "--softmax-type": "vanilla",
    "--weight-decay-incr-style": "constant",
    "--muon-scalar-optimizer": "adam",
    "--tensor-parallel-num-weight-shards": "1",
    "--glu-linear-offset": "0",
    "--mtp-num-layers": "0",
    "--rope-type": "rope",
    "--exp-avg-dtype": "fp32",
    "--exp-avg-sq-dtype": "fp32",
    "--main-grads-dtype": "fp32",
    "--main-params-dtype": "fp32",
    "--megatron-fsdp-grad-comm-dtype": "fp32",
    "--megatron-fsdp-main-grads-dtype": "fp32",
    "--megatron-fsdp-main-params-dtype": "fp32",
    "--mid-level-dataset-surplus": "0.005",
    "--vocab-extra-ids": "0",
    "--error-injection-rate": "0",
}

# Old spellings, with the flags that replace them.
RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--layernorm-epsilon": "--norm-epsilon",
    "--min-scale": "--min-loss-scale",
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
    "--no-fsdp-reshard-after-forward": "--torch-fsdp2-no-reshard-after-forward",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt_param-scheduler",
    "--override-lr-scheduler": "--override-opt_param-scheduler",
    "--tiktoken-special-tokens": "--tokenizer-special-tokens",
    "--checkpoint-activations": "--recompute-granularity full --recompute-method uniform",
    "--activations-checkpoint-method": "--recompute-granularity full --recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
}


class Ignored(NamedTuple):
    """A flag that is accepted and has no effect.

    nargs: 0 for a switch, 1 for a flag with a value, "*" for a flag with several values.
    reason: the rest of the sentence that begins with "--flag has no effect".
    """

    nargs: int | str
    reason: str


@cache
def ignored_flags() -> Mapping[str, Ignored]:
    """Returns all flags that are accepted and have no effect."""
    flags = {}
    for entry, reason in WITHOUT_EFFECT.items():
        flag, _, metavar = entry.partition(" ")
        flags[flag] = Ignored(1 if metavar else 0, f"here: {reason}")
    for table in (
        [(f"here: {reason}", names) for reason, names in IGNORED_FAMILIES],
        [(f"without {feature}, which is not built", names) for feature, names in DETAILS],
    ):
        for reason, names in table:
            for name in names.split():
                flag, equals, several = name.partition("=")
                nargs = (several or 1) if equals else 0
                flags[f"--{flag}"] = Ignored(nargs, reason)
    return flags


def ignored_notices(given: Sequence[str]) -> list[str]:
    """Returns a line for each of the given flags without effect, or one line for many of them."""
    if len(given) > MOST_REASONS:
        return [
            f"{len(given)} flags have no effect here (--help ignored has the reasons): "
            + ", ".join(given)
        ]
    return [f"{flag} has no effect {ignored_flags()[flag].reason}" for flag in given]


def is_only_value(flag: str, value: str) -> bool:
    """Returns whether `value` is the one that a flag of ONLY_VALUE allows.

    Numbers are compared as numbers: 1.0 is 1.
    """
    only = ONLY_VALUE[flag]
    try:
        return value == only or float(value) == float(only)
    except ValueError:
        return False


def dashed(word: str, known: Iterable[str]) -> str:
    """Returns the word with dashes for the underscores of a flag's name, as in --num_layers.

    A name that is a known flag as it stands, or that no known flag explains, is not changed.
    """
    name, equals, value = word.partition("=")
    if not name.startswith("--") or "_" not in name or name in known:
        return word
    renamed = name.replace("_", "-")
    return renamed + equals + value if renamed in known else word


def add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted and ignored, and the flags that allow only one value.

    Each is stored under its own spelling with the dashes, which no field has. `take_ignored` and
    `only_value_faults` find it by this name.
    """
    for flag, ignored in ignored_flags().items():
        if ignored.nargs == 0:
            parser.add_argument(flag, dest=flag, action="store_true", help=argparse.SUPPRESS)
        else:
            nargs = None if ignored.nargs == 1 else ignored.nargs
            parser.add_argument(flag, dest=flag, nargs=nargs, help=argparse.SUPPRESS)
    for flag in ONLY_VALUE:
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS)


def renamed_words(argv: Sequence[str], parsed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns `argv` with old spellings replaced, and a notice for each flag replaced.

    parsed: the flags of the parser. Underscores in the name of a flag are replaced by dashes.
    """
    renamed, notices = [], []
    known = {*parsed, *RENAMED, *refused_flags()}
    for word in (dashed(word, known) for word in argv):
        name, equals, value = word.partition("=")
        if name in RENAMED:
            notices.append(f"{name} is an old spelling, read as {RENAMED[name]}")
            # The last word takes the value of the old flag. The words before it are complete.
            *added, name = RENAMED[name].split()
            renamed += added
        renamed.append(name + equals + value)
    return renamed, notices


def only_value_faults(given: dict[str, Any]) -> list[str]:
    """Removes the flags that allow only one value, and returns a fault for each other value."""
    return [
        f"Megatron's {flag} {value} is not supported here, only {only}: {refusal_reason(flag)}"
        for flag, only in ONLY_VALUE.items()
        if not is_only_value(flag, value := given.pop(flag, None) or only)
    ]


def take_ignored(given: dict[str, Any]) -> list[str]:
    """Removes the flags without effect, and returns notices about them."""
    return ignored_notices([flag for flag in ignored_flags() if given.pop(flag, None)])


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


# What other training programs call a flag of this one.
OTHER_NAMES: Mapping[str, str] = {
    "--learning-rate": "--lr",
    "--max-steps": "--train-iters",
    "--num-steps": "--train-iters",
    "--steps": "--train-iters",
    "--epochs": "--train-samples",
    "--num-epochs": "--train-samples",
    "--num-train-epochs": "--train-samples",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--lr-warmup": "--lr-warmup-iters",
    "--warmup-steps": "--lr-warmup-iters",
    "--max-grad-norm": "--clip-grad",
    "--max-seq-length": "--seq-length",
    "--block-size": "--seq-length",
    "--output-dir": "--save",
    "--save-dir": "--save",
    "--rope-theta": "--rotary-base",
    "--resume": "--load",
    "--resume-from-checkpoint": "--load",
    "--gradient-checkpointing": "--recompute-policy",
    "--activation-checkpointing": "--recompute-policy",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
}


NEGATIONS = {"no", "not", "disable", "without"}


def closest_flag(name: str, supported: Iterable[str], *others: str) -> str | None:
    """Returns the known flag that `name` was probably meant to be, or None if none is near.

    The order is: the flag of this name in other programs, then `supported`, then `others`. A flag
    is near if its words are those of `name`, up to typing errors and a word more or less.
    """
    supported = list(supported)
    other = OTHER_NAMES.get(name.replace("_", "-"))
    if other in supported:
        return other
    for known in (supported, others):
        found = max(((_nearness(name, one), one) for one in known), default=(0.0, ""))
        if found[0] > 0.0:
            return found[1]
    return None


def _nearness(name: str, known: str) -> float:
    """Returns how near two flags are, at most 2; 0.0 if one has a word that changes the meaning."""
    mine, theirs = _words(name), _words(known)
    if "".join(mine) == "".join(theirs):
        return 2.0
    fewer, more = sorted((mine, theirs), key=len)
    # The first word is the subject: a flag with another one is about something else.
    if 3 * len(fewer) < 2 * len(more) or (
        len(mine) != len(theirs) and not _is_same_word(mine[0], theirs[0])
    ):
        return 0.0
    left = list(more)
    for word in fewer:
        same = next((one for one in left if _is_same_word(word, one)), None)
        if same is None:
            return 0.0
        left.remove(same)
    if NEGATIONS & {*left}:
        return 0.0
    return len(fewer) / len(more) + difflib.SequenceMatcher(None, name, known).ratio()


def _words(name: str) -> list[str]:
    words = name.strip("-").replace("_", "-").split("-")
    return words[1:] if words[0] in ("use", "enable") and len(words) > 1 else words


def _is_same_word(word: str, other: str) -> bool:
    """Returns whether two words are one, abbreviated (len, length) or with a typing error."""
    if word == other:
        return True
    short, long = sorted((word, other), key=len)
    starts = (short, short.rstrip("s"))
    if any(len(one) >= 3 and long.startswith(one) for one in starts) and long.isalpha():
        return True
    return (
        word[:1] == other[:1]
        and re.sub(r"\D", "", word) == re.sub(r"\D", "", other)
        and difflib.SequenceMatcher(None, word, other).ratio() > 0.75
    )


def unread_faults(unread: Sequence[str], supported: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the faults of the words that no flag of the parser takes.

    Also returns the supported flags that the unknown ones were probably meant to be.

    Refused flags with one reason share a fault. The values of an unknown flag are no faults.
    """
    names = list(dict.fromkeys(word.partition("=")[0] for word in unread if word.startswith("--")))
    refused: dict[str, list[str]] = {}
    unknown, meant = [], []
    for name in names:
        if reason := refusal_reason(name):
            refused.setdefault(reason, []).append(name)
            continue
        closest = closest_flag(name, supported, *ignored_flags())
        meant += [closest] if closest is not None else []
        unknown.append(
            f"unknown flag {name}: "
            + (f"did you mean {closest}?" if closest else "--help lists the flags")
        )
    if unread and not names:
        unknown = [f"{unread[0]!r} follows no flag that takes it"]
    return [
        *unknown,
        *(
            f"Megatron's {_listed(flags)} {'is' if len(flags) == 1 else 'are'} not supported "
            f"here: {reason}"
            for reason, flags in refused.items()
        ),
    ], meant


def _listed(flags: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))
