"""The flags of RecomputeConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config.host_parts import MEGATRON_PARTS
from megatron_lite.config.recompute import GRANULARITIES, METHODS, RecomputeConfig
from megatron_lite.config.regions import ALIAS, CORE_ATTENTION, MODULES, regions_help


def add_recompute_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "activation recomputation", RecomputeConfig)
    group.switch("--recompute-activations", "the same as --recompute-granularity selective")
    group.value(
        "--recompute-granularity",
        str,
        "rebuild whole layers in backward, or --recompute-modules of each layer",
        values=GRANULARITIES,
    )
    group.value(
        "--recompute-method",
        str,
        "full: units of --recompute-num-layers layers, or the first of them in a stage",
        values=METHODS,
    )
    group.value(
        "--recompute-num-layers",
        int,
        "uniform: layers of a unit; block: layers of each stage (1 if omitted)",
    )
    group.switch(
        "--distribute-saved-activations", "keep 1/t of a unit's input on each tensor-parallel rank"
    )
    group.value(
        "--recompute-modules",
        str,
        f"regions of selective ({CORE_ATTENTION} if omitted): {regions_help()}",
        values=(*MODULES, ALIAS),
        nargs="+",
    )
    group.value(
        "--recompute-policy",
        str,
        "what each layer rebuilds and where it keeps the rest, such as '0-3:full/2; "
        "every-2:core_attn+layernorm; *:none' instead of --recompute-granularity and its modules; "
        "auto chooses the fastest one that fits --memory-budget",
    )
    group.value(
        "--memory-budget",
        str,
        "for --recompute-policy auto: the memory of one rank for everything that it allocates, "
        "such as 80GiB; derived on a GPU: its memory less a reserve",
    )
    group.switch(
        "--contiguous-saved-activations",
        "keep the inputs of recomputed layers in one allocation, made once",
    )
    group.value(
        "--activation-memory-budget",
        float,
        "under --torch-compile: compile each layer as a whole, and let the compiler choose what "
        "it keeps for backward: at most this share of its activations, 0 to 1",
    )
    group.off_switch(
        "--no-recompute-tail-skip",
        "recompute_tail_skip",
        "replays also do their last matmul, whose result nothing reads",
    )
    group.value(
        "--num-microbatches-with-partial-activation-checkpoints",
        int,
        "in a pipeline: of as many micro-batches as are in flight at once, so many keep everything",
    )
    group.value(
        "--cpu-offloading-num-layers",
        int,
        "keep what so many first layers of each stage save in host memory: the policy "
        "'0-N:none@host'",
    )
    group.switch(
        "--fine-grained-activation-offloading",
        "keep what --offload-modules of every layer save in host memory: the policy "
        "'*:none@host(..)'",
    )
    group.value("--offload-modules", str, "the modules", values=MEGATRON_PARTS, nargs="+")
    group.switch(
        "--recompute-verify",
        "compare replays with their forward, and predicted with measured bytes; slow",
    )
