"""The predicted numbers of parameters, and the bytes of weights, gradients and optimizer states,
are those that a run holds."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from torch.distributed.tensor import DTensor

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.memory.predict.states import RankStates, rank_parameter_count, rank_states
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.equality import VARIANTS
from tests.support.layouts import LAYOUTS
from tests.support.pairs import covered, sampled
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run
from tests.support.storages import addresses, distinct

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


def local(tensors):
    return [one.to_local() if isinstance(one, DTensor) else one for one in tensors]


def bytes_of(tensors):
    """Returns the bytes of the storages, each once."""
    return sum(storage.nbytes() for storage in distinct(local(tensors)))


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
        assert rank_parameter_count(run, parallel.pp_rank) == sum(one.numel() for one in weights)
        own = addresses(local(weights))
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
            on_host=bytes_of(piece.master for piece in masters if piece.on_host)
            + bytes_of(states(True))
            + bytes_of(link.buffers if link else ()),
        )
        if found.on_host:
            assert bytes_of(trainer.optimizer.host_tensors()) == found.on_host
        told = rank_states(
            run, parallel.pp_rank, dp_cp_size=parallel.dp_cp_size, dp_cp_rank=parallel.dp_cp_rank
        )
    return found, told._replace(rounding=0, pieces=(), part=0, sent=0)


def differing(rank, world_size, runs):
    both = [(run, *held(run)) for run in runs]
    return [(run, found, told) for run, found, told in both if found != told]


def run_of(layout, variant, bf16=False, *, rule="adam", **settings):
    run = tiny_run(
        **({**VARIANTS[variant], "hidden_size": 48}),
        train_iters=1,
        eval_iters=0,
        bf16=bf16,
        data_parallel=LAYOUTS[layout],
        learning_rate=1e-3,
        **settings,
    )
    return replace(run, optimizer=RULES.get(rule) or OptimizerConfig(optimizer=rule))


def of_two_ranks(layout):
    """Returns the runs of data-parallel ranks."""
    return [
        run_of(layout, variant, rule=rule, bf16=bf16)
        for variant, rule, bf16 in (
            ("gpt2", "adam", False),
            ("deepseek", "muon", True),
            ("qwen", "adam", True),
            ("gshard", "muon", False),
            ("gpt2", "sgd", True),
            *(OF_ZERO1 if "zero1" in layout else ()),
        )
    ]


def of_four_ranks(layout, rule="adam", **place):
    """Returns runs in a tensor or pipeline parallel layout, or of instances of states."""
    return [
        run_of(layout, variant, bf16=bf16, rule=rule if bf16 else "adam", **place)
        for variant, bf16 in (("gpt2", False), ("qwen", True))
    ]


def of_instances(number):
    """Of four instances each has one rank, which holds all states."""
    return [
        run
        for layout in ("zero1, overlap", "fsdp2")
        for run in of_four_ranks(layout, num_distributed_optimizer_instances=number)
    ]


def of_one_rank():
    cases = covered(product(("replicated", "zero1", "fsdp2"), VARIANTS, (False, True)))
    return [run_of(*case) for case in sampled(cases, every=2)]


# By name: the ranks, and a function that returns their runs.
RUNS = {
    "alone": (1, of_one_rank),
    **{layout: (2, partial(of_two_ranks, layout)) for layout in LAYOUTS},
    "fsdp2, uneven": (3, partial(of_four_ranks, "fsdp2", global_batch_size=3)),
    **{
        f"{layout}, {name}": (4, partial(of_four_ranks, layout, rule, **place))
        for layout, rule in (("replicated", "host"), ("zero1, overlap", "host"), ("fsdp2", "adam"))
        for name, place in (
            ("TP 2", dict(tp_size=2, sequence_parallel=True)),
            ("PP 2", dict(pipeline_model_parallel_size=2)),
        )
    },
    **{f"{number} instances": (4, partial(of_instances, number)) for number in (2, 4)},
}


@pytest.mark.runs(daily=5, ci=5)
@pytest.mark.parametrize("name", RUNS)
def test_states_are_those_predicted(name):
    ranks, runs = RUNS[name]
    for differs in run_ranks(differing, ranks, runs()):
        assert differs == []
