"""What pipeline ranks hold for backward: after every action exactly what was predicted, by live
storages. No tolerance."""

import time

import pytest
import torch

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.predict.pipeline_memory import rank_memory, ticks
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.batches import cut, document_rules
from megatron_lite.training.build_trainer import build_stages
from megatron_lite.training.step import StageRunner
from tests.support.commands import parsed_line
from tests.support.limits import HANG_S
from tests.support.ranks import run_ranks
from tests.support.storages import addresses

LAYERS, VOCABULARY, MICRO_BATCHES = 8, 60, 4
GPT2 = "--hidden-dropout 0.1 --attention-dropout 0"
LLAMA = (
    "--swiglu --ffn-hidden-size 24 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights "
    "--group-query-attention "
    "--num-query-groups 2"
)
DOCUMENTS = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
FULL = "--recompute-granularity full --recompute-method"
CASES = [
    (2, f"--pipeline-model-parallel-size 2 {FULL} uniform --recompute-num-layers 3", GPT2),
    (
        2,
        f"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {FULL} block",
        LLAMA,
    ),
    (
        4,
        (
            "--pipeline-model-parallel-size 4 --recompute-granularity selective "
            "--recompute-modules layernorm mlp"
        ),
        LLAMA,
    ),
    (
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 "
        "--sequence-parallel --recompute-granularity selective --recompute-modules layernorm "
        "activation",
        GPT2,
    ),
    (
        4,
        f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 {FULL} uniform "
        "--distribute-saved-activations",
        GPT2,
    ),
    (
        4,
        (
            f"--pipeline-model-parallel-size 4 {FULL} uniform "
            "--num-microbatches-with-partial-activation-checkpoints 2"
        ),
        GPT2,
    ),
    (
        4,
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
        f"--num-virtual-stages-per-pipeline-rank 2 {FULL} uniform "
        "--num-microbatches-with-partial-activation-checkpoints 5",
        LLAMA,
    ),
    (
        2,
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --loss-chunk-size 4 "
        "--window-size 3,0 --window-attn-skip-freq [0]*7+[1] --no-rope-freq [1]+[0]*7",
        LLAMA,
    ),
    (4, f"--pipeline-model-parallel-size 4 {DOCUMENTS}", GPT2),
    (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        f"{DOCUMENTS} --recompute-policy stage0/*:full/2;stage1/*:core_attn;stage2/*:ops(matmul)",
        GPT2,
    ),
    # Unfused attention keeps the starts only for a replay.
    (
        2,
        "--pipeline-model-parallel-size 2 --attention-backend unfused "
        f"{DOCUMENTS} --recompute-policy stage0/*:none;stage1/*:core_attn",
        LLAMA,
    ),
]


def config_of(flags, model):
    sizes = (
        f"--num-layers {LAYERS} --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
        "--max-position-embeddings 8 "
        f"--micro-batch-size 2 --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 "
        "--distributed-backend gloo --bf16"
    )
    return parsed_line(f"{sizes} {model} {flags}").config


class Live(LiveStorages):
    """Looks at the end of actions only, which is faster."""

    patience_s = HANG_S / 10  # in all

    def after(self, func):
        pass

    def settled(self, expected, known, more):
        """Bytes alive in other storages than the known ones, less `more`. A backend's thread may
        let go of a collective's tensors late: where they are not what is expected, it is given
        time."""
        while True:
            found = (
                sum(size for address, size in self.storages().items() if address not in known)
                - more
            )
            if found == expected or self.patience_s <= 0:
                return found
            time.sleep(0.01)
            self.patience_s -= 0.01


class Tokens:
    def __init__(self, count=MICRO_BATCHES, rules=None):
        self.count, self.rules = count, rules

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        text = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(number))
        return cut(text, rules=self.rules)


def measured(config, parallel, num_microbatches):
    """After each action of a step: the bytes of the live storages that wait for a backward on this
    rank."""
    with torch.autograd.set_multithreading_enabled(False):
        runner = StageRunner.of(config, build_stages(config, parallel), parallel)
        GradBuffer(dict(runner.model.named_parameters()), parallel)
        expected = iter(
            ticks(config, "cpu", rank=parallel.pp_rank, num_microbatches=num_microbatches)
        )
        live, seen, losses = Live(), [], set()

        class Watched(list):
            def __iter__(self):
                for action in super().__iter__():
                    yield action
                    if action.kind == "forward" and list(runner.model)[action.chunk].stage.is_last:
                        losses.add(action)
                    leaving = addresses(one.tensor for one in runner.links._leaving)
                    held = live.settled(next(expected).kept_bytes, leaving, 4 * len(losses))
                    seen.append((action, held))

        run = runner._run
        runner._run = lambda actions, *args, **named: run(Watched(actions), *args, **named)
        with live:
            runner.train(Tokens(num_microbatches, document_rules(config)), loss_factor=1.0)
        return seen


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("ranks, flags, model", CASES)
def test_after_every_action_a_rank_holds_what_is_predicted(ranks, flags, model):
    config = config_of(f"{flags} --no-overlap-p2p-communication", model)

    def work(rank, world_size):
        with parallel_state(config.parallel, seed=1) as parallel:
            return measured(config, parallel, MICRO_BATCHES), [
                (tick.action, tick.kept_bytes)
                for tick in ticks(
                    config, "cpu", rank=parallel.pp_rank, num_microbatches=MICRO_BATCHES
                )
            ]

    for seen, expected in run_ranks(work, ranks, detail=False):
        assert seen == expected


@pytest.mark.parametrize("num_chunks, num_kept", [(1, 2), (2, 6), (3, 8)])
def test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced(num_kept, num_chunks):
    chunks = f"--num-virtual-stages-per-pipeline-rank {num_chunks}" if num_chunks > 1 else ""
    config = config_of(
        "--num-layers 18 --pipeline-model-parallel-size 3 --recompute-policy *:full "
        f"--num-microbatches-with-partial-activation-checkpoints {num_kept} {chunks} "
        "--global-batch-size 120",
        GPT2,
    )
    for rank in range(3):
        longest = max(
            tick.kept_bytes for tick in ticks(config, "cpu", rank=rank, num_microbatches=120)
        )
        assert rank_memory(config, "cpu", rank).held_bytes == longest
