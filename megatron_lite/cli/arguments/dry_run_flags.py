"""The flags of DryRunConfig, which print what a run needs and stop."""

from __future__ import annotations

import argparse

from megatron_lite.config.dry_run_settings import DEVICES as DRY_RUN_DEVICES


def add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run-memory",
        action="store_true",
        help="run one step of some ranks without their machines, on tensors without values; print "
        "the memory that each rank needs, and stop",
    )
    parser.add_argument(
        "--dry-run-ranks",
        metavar="RANK,..",
        help="global ranks of --dry-run-memory (default: one of each kind of pipeline rank)",
    )
    parser.add_argument(
        "--dry-run-world-size",
        type=int,
        metavar="N",
        help="number of ranks of the run of --dry-run-memory (default: those that the launcher "
        "started, or those of one model)",
    )
    parser.add_argument(
        "--dry-run-device",
        metavar="{" + ",".join(DRY_RUN_DEVICES) + "}",
        help="device of the run of --dry-run-memory (default: the one that the run would use); "
        "cuda cannot be simulated yet, and the report says so",
    )
