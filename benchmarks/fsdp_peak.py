"""Measures the peak of FSDP2 with and without FSDP units for token embedding and output projection.

Nothing is computed: tensors have sizes but no contents (torch's FakeTensorMode). One process is
rank 0 of a group that sends nothing. Llama 3 8B over 8 ranks therefore takes a minute on any CPU,
and the figures are exact to the byte. Norms are LayerNorm, because an RMSNorm on a CPU is many
operators.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.sharding import shard_model_
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.rng import DEFAULT, RngSnapshot, RngStreams
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.rank_context import RankContext

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """The bytes of one rank.

    states_bytes: the float32 weights and moments that the rank keeps.
    beside_bytes: the most bytes alive at once besides these in two micro-batches: gathered weights,
        gradients and activations.
    """

    tied: bool
    memory_efficient: bool
    states_bytes: int
    beside_bytes: int

    @property
    def total_bytes(self) -> int:
        """The peak of the rank."""
        return self.states_bytes + self.beside_bytes


class NoRandomness:
    """Random streams without states, for a model that draws no random numbers.

    Real states would be tensors with contents, which FakeTensorMode does not allow.
    """

    device = torch.device("cpu")

    def snapshot(self) -> RngSnapshot:
        """Returns an empty snapshot."""
        return RngSnapshot(DEFAULT, {})

    def restore(self, snapshot: RngSnapshot) -> None:
        """Does nothing: the snapshot is empty."""


@contextmanager
def rank_0_of(ranks: int) -> Iterator[ParallelState]:
    """Yields the state of rank 0 of a data-parallel group whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with parallel_state(ParallelConfig(distributed_backend="gloo"), seed=1) as parallel:
            yield replace(parallel, rng=cast(RngStreams, NoRandomness()))
    finally:
        dist.destroy_process_group()


def model_config(args: argparse.Namespace, *, tied: bool) -> ModelConfig:
    """Returns a Llama config of the given sizes."""
    return ModelConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        group_query_attention=True,
        num_query_groups=args.num_query_groups,
        max_position_embeddings=args.seq_length,
        swiglu=True,
        position_embedding_type="rope",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        untie_embeddings_and_output_weights=not tied,
    )


def measure(
    config: ModelConfig,
    args: argparse.Namespace,
    parallel: ParallelState,
    *,
    memory_efficient: bool,
) -> Row:
    """Measures one model, sharded in one way, over forward and backward of two micro-batches."""
    layout = DataParallelConfig(
        use_torch_fsdp2=True, fsdp_memory_efficient_wrapping=memory_efficient
    )
    with torch.autograd.set_multithreading_enabled(False):
        context = RankContext.of(parallel, sequence_parallel=False, params_dtype=torch.bfloat16)
        plan = plan_stage(
            RecomputeConfig(recompute_policy=args.recompute_policy), config.num_layers
        )
        model = GPTModel(
            config,
            context,
            vocab_size=args.vocab_size,
            padded_vocab_size=args.vocab_size,
            plan=plan,
        )
        shard_model_(model, parallel, layout)
        optimizer = Optimizer(model, OptimizerConfig(), parallel, layout)
        tokens = torch.zeros((args.batch_size, args.seq_length), dtype=torch.int64)
        with LiveStorages() as live:
            for _ in range(2):
                optimizer.zero_grad()
                model.loss(tokens, tokens).mean().backward()
        states = sum(
            state.nbytes for of_piece in optimizer.states.values() for state in of_piece.values()
        )
        return Row(
            tied=not config.untie_embeddings_and_output_weights,
            memory_efficient=memory_efficient,
            states_bytes=states,
            beside_bytes=live.peak_bytes,
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fsdp_peak.py",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in (
        ("ranks", 8),
        ("num-layers", 32),
        ("hidden-size", 4096),
        ("ffn-hidden-size", 14336),
        ("num-attention-heads", 32),
        ("num-query-groups", 8),
        ("vocab-size", 128256),
        ("seq-length", 512),
        ("batch-size", 2),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help="default: Llama 3 8B, torchtune's batch",
        )
    parser.add_argument("--recompute-policy", default="*:full", help="activation recomputation")
    parser.add_argument("--json", metavar="FILE", help="also write settings and rows")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 0."""
    args = parse(argv)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    print(
        ", ".join(f"{name} {value}" for name, value in settings.items()),
        "bf16, rank 0, GiB",
        sep="\n",
        flush=True,
    )
    print(f"{'':34}{'states':>9}{'beside':>9}{'peak':>9}{'beside':>9}{'peak':>8}")
    rows = []
    for tied in (False, True):
        config = model_config(args, tied=tied)
        with rank_0_of(args.ranks) as parallel, FakeTensorMode():
            default, efficient = (
                measure(config, args, parallel, memory_efficient=units) for units in (False, True)
            )
        for row in (default, efficient):
            name = (
                f"{'tied' if tied else 'untied'}, "
                f"{'memory-efficient' if row.memory_efficient else 'layers and root'}"
            )
            sizes = "".join(
                f"{size / GIB:9.3f}"
                for size in (row.states_bytes, row.beside_bytes, row.total_bytes)
            )
            print(
                f"{name:34}{sizes}{row.beside_bytes / default.beside_bytes - 1:+9.1%}"
                f"{row.total_bytes / default.total_bytes - 1:+8.1%}",
                flush=True,
            )
        rows += [default, efficient]
    if args.json:
        report: dict[str, Any] = {"settings": settings, "rows": [asdict(row) for row in rows]}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
