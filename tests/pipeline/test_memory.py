"""What pipeline ranks hold for backward: after every action exactly what was predicted, by live storages. No tolerance."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # dispatch modes import it when first entered: 3 s, here once instead of in every forked rank

from arguments import parse_args
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.live_storages import LiveStorages
from megatron_lite.memory.pipeline import ticks
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel.state import parallel_state
from megatron_lite.pipeline.order import Action
from megatron_lite.training.batches import MicroBatch
from megatron_lite.training.build import build_stages
from megatron_lite.training.observe import Observer
from megatron_lite.training.runner import StageRunner
from tests.support.ranks import run_ranks

LAYERS, VOCABULARY, MICRO_BATCHES = 8, 60, 4
GPT2 = "--hidden-dropout 0.1 --attention-dropout 0"
LLAMA = ("--swiglu --ffn-hidden-size 24 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
         "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --group-query-attention "
         "--num-query-groups 2")
FULL = "--recompute-granularity full --recompute-method"
CASES = [
    (2, "--pipeline-model-parallel-size 2", GPT2),
    (2, f"--pipeline-model-parallel-size 2 {FULL} uniform --recompute-num-layers 3", GPT2),
    pytest.param(2, f"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {FULL} block", LLAMA,
                 marks=pytest.mark.long),
    (4, "--pipeline-model-parallel-size 4 --recompute-granularity selective --recompute-modules layernorm mlp", LLAMA),
    (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--sequence-parallel --recompute-granularity selective --recompute-modules layernorm activation", GPT2),
    (4, f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 {FULL} uniform --distribute-saved-activations", GPT2),
    (4, f"--pipeline-model-parallel-size 4 {FULL} uniform --num-microbatches-with-partial-activation-checkpoints 2", GPT2),
    pytest.param(4, "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
                 f"--num-virtual-stages-per-pipeline-rank 2 {FULL} uniform "
                 "--num-microbatches-with-partial-activation-checkpoints 5", LLAMA, marks=pytest.mark.long),
    (2, "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --loss-chunk-size 4", LLAMA),
]


def config_of(flags: str, model: str) -> RunConfig:
    sizes = (f"--num-layers {LAYERS} --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
             f"--micro-batch-size 2 --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --distributed-backend gloo --bf16")
    return parse_args(f"{sizes} {model} {flags}".split()).config


class Live(LiveStorages):
    """Looks at the end of actions only, which is faster."""

    def after(self, func: object) -> None:
        pass


class Tokens:
    def __len__(self) -> int:
        return MICRO_BATCHES

    def __getitem__(self, number: int) -> MicroBatch:
        text = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(number))
        return MicroBatch(text[:, :-1].clone(), text[:, 1:].clone())


@pytest.mark.parametrize(("ranks", "flags", "model"), CASES)
def test_after_every_action_a_rank_holds_what_is_predicted(ranks, flags, model):
    config = config_of(f"{flags} --no-overlap-p2p-communication", model)

    def work(rank, world_size):
        with parallel_state(config.parallel, seed=1) as parallel, torch.autograd.set_multithreading_enabled(False):
            runner = StageRunner.of(config, build_stages(config, parallel), parallel)
            GradBuffer(dict(runner.model.named_parameters()), parallel)
            live, seen, losses = Live(), [], set()

            def after(action: Action) -> None:
                if action.kind == "forward" and list(runner.model)[action.chunk].stage.is_last:
                    losses.add(action)
                leaving = {tensor.untyped_storage()._cdata for tensor in runner.links.leaving}
                seen.append((action, live.bytes_beside(leaving) - 4 * len(losses)))

            with live:
                runner.train(Tokens(), share=1.0, observer=Observer(), after=after)
            return seen, [(tick.action, tick.kept_bytes) for tick in
                          ticks(config, "cpu", rank=parallel.pp_rank, num_microbatches=MICRO_BATCHES)]

    for seen, expected in run_ranks(work, ranks, detail=False):
        assert seen == expected
