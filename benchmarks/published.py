"""Compares the time model with published runs.

No constant is fitted to a run: the figures of a machine come from its data sheet and from published
microbenchmarks (megatron_lite/plan/machines/*.json). docs/planning.md has the table, and says what
the papers do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import DataParallelConfig, ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.config.training import TrainingConfig
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.plan.step_time import StepTime, step_time

MICRO_BATCH_SIZES = (1, 2, 4, 8)
MEGATRON, LLAMA = "arXiv 2104.04473, Table 1", "arXiv 2407.21783, Table 4"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run.

    tflops: the achieved TFLOP/s of one GPU.
    """

    name: str
    source: str
    num_gpus: int
    tflops: float


@dataclass(frozen=True, kw_only=True)
class MegatronRun(Published):
    """A row of MEGATRON, on A100 80 GB."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    batch: int

    @property
    def flops(self) -> float:
        """The FLOPs of a step by formula 3 of the paper."""
        s, h, v = 2048, self.hidden, 51200
        layers = 96 * self.batch * s * self.layers * h * h
        return layers * (1 + s / (6 * h) + v / (16 * self.layers * h))

    def config(self, micro_batch_size: int) -> RunConfig:
        """Returns the run. ValueError: the micro-batches do not divide."""
        per_rank, chunks = self.layers // self.pp, None
        if self.pp > 1:
            chunks = next(one for one in range(2, per_rank + 1) if per_rank % one == 0)
            if self.batch // (self.num_gpus // self.tp // self.pp * micro_batch_size) % self.pp:
                raise ValueError("the interleaved schedule needs a multiple of p micro-batches")
        return RunConfig(
            model=ModelConfig(
                num_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                max_position_embeddings=2048,
                attention_backend="unfused",
            ),
            training=TrainingConfig(
                micro_batch_size=micro_batch_size, global_batch_size=self.batch, bf16=True
            ),
            data=DataConfig(seq_length=2048),
            tokenizer=TokenizerConfig(vocab_size=51199, make_vocab_size_divisible_by=1),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                num_virtual_stages_per_pipeline_rank=chunks,
                overlap_p2p_comm=False,
            ),
            data_parallel=DataParallelConfig(grad_reduce_in_bf16=True),
            recompute=RecomputeConfig(
                recompute_granularity="full", recompute_method="uniform", recompute_tail_skip=False
            ),
        )


MEGATRON_RUNS = tuple(
    MegatronRun(
        name=f"GPT {name}",
        source=MEGATRON,
        heads=heads,
        hidden=hidden,
        layers=layers,
        tp=tp,
        pp=pp,
        num_gpus=gpus,
        batch=batch,
        tflops=tflops,
    )
    for name, heads, hidden, layers, tp, pp, gpus, batch, tflops in (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
        ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
        ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
        ("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
)
LLAMA_RUN = Published(name="Llama 3 405B", source=LLAMA, num_gpus=8192, tflops=430)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run and its prediction.

    tflops: the predicted TFLOP/s of one GPU, by the FLOPs that the paper counts.
    """

    run: Published
    micro_batch_size: int
    virtual_stages: int
    time: StepTime
    tflops: float

    @property
    def error(self) -> float:
        """The relative error of the prediction: above 0 it is too fast."""
        return self.tflops / self.run.tflops - 1.0


def rows() -> Iterator[Row]:
    """Yields the prediction of every published run."""
    a100 = load_hardware("a100-80gb")
    for run in MEGATRON_RUNS:
        found = []
        for size in MICRO_BATCH_SIZES:
            try:
                config = run.config(size)
                time = step_time(
                    config,
                    a100,
                    run.num_gpus,
                    fused_accumulation=True,
                    transfer_bytes=2048 * size * run.hidden * 2 // run.tp,
                )
            except ValueError:
                continue  # the batch does not divide into such micro-batches
            found.append(
                Row(
                    run=run,
                    micro_batch_size=size,
                    virtual_stages=config.parallel.num_virtual_stages_per_pipeline_rank or 1,
                    time=time,
                    tflops=run.flops / time.seconds / run.num_gpus / 1e12,
                )
            )
        yield max(found, key=lambda row: row.tflops)
    yield llama_row()


def llama_row() -> Row:
    """Returns the prediction of Llama 3 405B at a sequence length of 8192."""
    p, chunks, layers = 16, 8, 126
    model = ModelConfig(
        num_layers=p * chunks,
        hidden_size=16384,
        ffn_hidden_size=53248,
        num_attention_heads=128,
        group_query_attention=True,
        num_query_groups=8,
        max_position_embeddings=8192,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config = RunConfig(
        model=model,
        training=TrainingConfig(micro_batch_size=1, global_batch_size=2048, bf16=True),
        data=DataConfig(seq_length=8192),
        tokenizer=TokenizerConfig(vocab_size=128255),
        parallel=ParallelConfig(
            tensor_model_parallel_size=8,
            sequence_parallel=True,
            pipeline_model_parallel_size=p,
            num_virtual_stages_per_pipeline_rank=chunks,
        ),
        data_parallel=DataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
    )
    lengths = [0, *[1] * layers, 0]
    all_stages = [
        Stage(
            number=number,
            count=p * chunks,
            rank=number % p,
            chunk=number // p,
            first_layer=sum(lengths[:number]),
            num_layers=length,
        )
        for number, length in enumerate(lengths)
    ]
    time = step_time(
        config,
        load_hardware("h100-80gb"),
        LLAMA_RUN.num_gpus,
        fused_accumulation=True,
        all_stages=all_stages,
    )
    flops = step_flops(
        replace(model, num_layers=layers), batch=2048, seq_length=8192, padded_vocab_size=128256
    )
    return Row(
        run=LLAMA_RUN,
        micro_batch_size=1,
        virtual_stages=chunks,
        time=time,
        tflops=flops / time.seconds / LLAMA_RUN.num_gpus / 1e12,
    )


def table(found: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| run | source | GPUs | b | v | achieved | predicted | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found:
        yield (
            f"| {row.run.name} | {row.run.source} | {row.run.num_gpus} | {row.micro_batch_size} "
            f"| {row.virtual_stages} | {row.run.tflops:.0f} | {row.tflops:.0f} | {row.error:+.1%} |"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(*table(list(rows())), sep="\n")
