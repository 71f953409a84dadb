"""The predicted bytes of weights, gradients and optimizer states are those that a run holds."""

from dataclasses import replace
from itertools import product

import pytest
from torch.distributed.tensor import DTensor

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.equality import VARIANTS
from tests.support.pairs import covered
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run
from tests.support.storages import addresses, distinct

OVERLAP = dict(overlap_grad_reduce=True, ddp_bucket_size=5000)
LAYOUTS = {
    "replicated": DataParallelConfig(),
    "replicated, buckets": DataParallelConfig(**OVERLAP),
    "ZeRO-1": DataParallelConfig(use_distributed_optimizer=True),
    "ZeRO-1, buckets": DataParallelConfig(use_distributed_optimizer=True, **OVERLAP),
    "FSDP2": DataParallelConfig(use_torch_fsdp2=True),
    "FSDP2, wrapped": DataParallelConfig(use_torch_fsdp2=True, fsdp_memory_efficient_wrapping=True),
}


ROUNDED = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16")
HOST = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.6)
RULES = {
    "rounded": OptimizerConfig(**ROUNDED, main_params_dtype="fp16", main_grads_dtype="bf16"),
    "host": OptimizerConfig(**HOST),
    "rounded, on the host": OptimizerConfig(**HOST, **ROUNDED, overlap_cpu_optimizer_d2h_h2d=True),
    "muon, on the host": OptimizerConfig(**HOST, optimizer="muon"),
}


OF_ZERO1 = (
    ("gpt2", "host", False),
    ("llama", "muon, on the host", True),
    ("qwen", "rounded", True),
    ("qwen", "rounded, on the host", True),
)


def bytes_of(tensors):
    """Returns the bytes of the storages, each once."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(storage.nbytes() for storage in distinct(local))


def held(run):
    """Returns the bytes that this rank holds after one step, and those predicted."""
    with parallel_state(run.parallel, seed=1) as parallel:
        trainer = build_trainer(run, parallel)
        grads = []
        publish = trainer.optimizer.layout.publish

        def remember():
            grads.extend(piece.grad for piece in trainer.optimizer.layout.pieces)
            publish()

        trainer.optimizer.layout.publish = remember
        trainer.run()
        weights = list(trainer.model.parameters())
        local = [one.to_local() if isinstance(one, DTensor) else one for one in weights]
        own = addresses(local)
        pieces = trainer.optimizer.layout.pieces
        masters = [piece for piece in pieces if not own & addresses([piece.master])]
        own |= addresses(piece.master for piece in masters)
        link = trainer.optimizer._rule.link

        def states(on_host):
            for piece in pieces:
                for value in trainer.optimizer.states[piece.name].values():
                    if piece.on_host == on_host and not own & addresses([value]):
                        yield value

        found = RankStates(
            weights=bytes_of(weights),
            masters=bytes_of(piece.master for piece in masters if not piece.on_host),
            gradients=bytes_of(grads),
            optimizer=bytes_of(states(False)),
            host_masters=bytes_of(piece.master for piece in masters if piece.on_host),
            host_optimizer=bytes_of(states(True)),
            host_copies=bytes_of(link.buffers if link else ()),
        )
        if found.on_host:
            held_there = bytes_of(trainer.optimizer.host_tensors())
            assert held_there == found.on_host
        told = rank_states(
            run, parallel.pp_rank, dp_cp_size=parallel.dp_cp_size, dp_cp_rank=parallel.dp_cp_rank
        )
    return found, told._replace(rounding=0)


def differing(rank, world_size, runs):
    both = {name: held(run) for name, run in runs.items()}
    return {name: (found, told) for name, (found, told) in both.items() if found != told}


def run_of(layout, variant, *, rule="adam", pp_size=1, **settings):
    bf16 = settings.pop("bf16", False)
    run = tiny_run(
        **({**VARIANTS[variant], "hidden_size": 48}),
        train_iters=1,
        eval_iters=0,
        bf16=bf16,
        data_parallel=LAYOUTS[layout],
        learning_rate=1e-3,
        **settings,
    )
    return replace(
        run,
        optimizer=RULES.get(rule) or OptimizerConfig(optimizer=rule),
        parallel=replace(run.parallel, pipeline_model_parallel_size=pp_size),
    )


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_data_parallel_ranks_are_those_predicted(layout):
    runs = {
        f"{variant} {rule} bf16={bf16}": run_of(layout, variant, rule=rule, bf16=bf16)
        for variant, rule, bf16 in (
            ("gpt2", "adam", False),
            ("gpt2", "muon", True),
            ("qwen", "adam", True),
            ("neox", "muon", False),
            ("gpt2", "sgd", True),
            *(OF_ZERO1 if "ZeRO" in layout else ()),
        )
    }
    assert run_ranks(differing, 2, runs) == [{}] * 2


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize(
    ("layout", "tp_size", "pp_size"),
    [
        (layout, *sizes)
        for layout in ("replicated", "ZeRO-1, buckets", "FSDP2")
        for sizes in ((2, 1), (1, 2))
    ],
)
def test_states_in_tensor_and_pipeline_parallel_layouts_are_those_predicted(
    layout, tp_size, pp_size
):
    runs = {
        variant: run_of(
            layout,
            variant,
            bf16=variant == "qwen",
            rule="host" if layout != "FSDP2" and variant == "qwen" else "adam",
            pp_size=pp_size,
            tp_size=tp_size,
            sequence_parallel=tp_size > 1,
        )
        for variant in ("gpt2", "qwen")
    }
    assert run_ranks(differing, 4, runs) == [{}] * 4


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize("instances", [2, 4])
def test_states_of_instances_are_those_predicted(instances):
    """Of four instances each has one rank, which holds all states."""
    runs = {
        f"{layout} {variant}": run_of(layout, variant, bf16=variant == "qwen")
        for layout in ("ZeRO-1, buckets", "FSDP2")
        for variant in ("gpt2", "qwen")
    }
    runs = {
        name: replace(
            run, parallel=replace(run.parallel, num_distributed_optimizer_instances=instances)
        )
        for name, run in runs.items()
    }
    assert run_ranks(differing, 4, runs) == [{}] * 4


def test_states_of_one_rank_are_those_predicted():
    runs = {
        f"{layout} {variant} {bf16}": run_of(layout, variant, bf16=bf16)
        for layout, variant, bf16 in covered(
            product(("replicated", "ZeRO-1", "FSDP2"), VARIANTS, (False, True))
        )
    }
    assert differing(0, 1, runs) == {}
