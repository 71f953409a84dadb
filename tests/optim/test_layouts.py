"""However data-parallel ranks share out a model, they train it as one process does; and where sums
run in the same order, bit for bit as replicas do."""

import pytest
import torch

from megatron_lite.config.optimizer_settings import WORDS, OptimizerConfig
from tests.support.equality import difference
from tests.support.layouts import LAYOUTS, differing, train
from tests.support.models import tp_state
from tests.support.ranks import run_ranks

STEPS = 3
HSDP = dict(instances=2, micro_batches=3)  # 12 sequences on 4 ranks
# world size, TP size, sequence parallel, variant, layouts, further options of the model
MESHES = {
    "dp2": (2, 1, False, "gpt2", tuple(LAYOUTS), {}),
    "dp3": (
        3,
        1,
        False,
        "llama",
        ("overlap", "zero1, overlap", "fsdp2, memory-efficient"),
        dict(loss_chunk_size=7),
    ),
    "dp2-tp2": (
        4,
        2,
        False,
        "nemotron",
        ("zero1, overlap", "fsdp2, memory-efficient"),
        dict(loss_chunk_size=7),
    ),
    "dp2-tp2-sequence-parallel": (4, 2, True, "gpt2", ("overlap", "zero1, overlap", "fsdp2"), {}),
    "host-dp2-tp2": (4, 2, True, "gpt2", ("replicated", "zero1, overlap"), {}),
    "hsdp-dp4": (4, 1, False, "gpt2", ("zero1", "zero1, overlap", "fsdp2, memory-efficient"), HSDP),
    "hsdp-dp2-tp2": (4, 2, True, "llama", ("zero1, overlap", "fsdp2"), HSDP),
    "muon-hsdp-dp4": (4, 1, False, "llama", ("zero1, overlap", "fsdp2"), HSDP),
    "muon-dp2": (2, 1, False, "llama", ("replicated", "zero1, overlap", "fsdp2"), {}),
    "muon-dp3": (3, 1, False, "gpt2", ("zero1", "fsdp2"), {}),
    "muon-tp2": (2, 2, False, "llama", ("replicated",), {}),
    "muon-dp2-tp2": (4, 2, True, "gpt2", ("zero1", "fsdp2, memory-efficient"), {}),
}
HOST = OptimizerConfig(
    clip_grad=0.5,
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.5,
    overlap_cpu_optimizer_d2h_h2d=True,
)
# Newton-Schulz multiplies a rounding error by less than 1000.
MUON = OptimizerConfig(
    optimizer="muon", muon_fp32_matmul_prec="high", muon_nesterov=True, clip_grad=0.5
)


def train_everywhere(rank, world_size, tp_size, name, options, layouts):
    instances = options.pop("instances", 1)
    with tp_state(tp_size, num_distributed_optimizer_instances=instances) as parallel:
        return {
            layout: train(name, parallel, LAYOUTS[layout], steps=STEPS, **options)
            for layout in layouts
        }


def test_the_word_embedding_is_the_first_on_the_host():
    """Two stages may hold it, beside weights of other sizes."""
    config = OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.1)
    assert config.on_host([("a", False, 90), (WORDS, False, 10)]) == [False, True]


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "mesh, dtype", [*((mesh, torch.float64) for mesh in MESHES), ("dp2", torch.float32)]
)
def test_every_layout_trains_as_a_single_process(mesh, dtype):
    """Clipped steps over the same 12 sequences each. Weights are compared in float64 alone: AdamW
    turns the rounding noise of a gradient that is zero in exact arithmetic (a key's bias) into
    steps of full size."""
    world_size, tp_size, sequence_parallel, name, layouts, options = MESHES[mesh]
    rule = dict(settings=MUON) if mesh.startswith("muon") else dict(clip_grad=0.5)
    place = dict(settings=HOST) if mesh.startswith("host") else {}
    options = {**options, **rule, "dtype": dtype}
    shared = dict(instances=options.pop("instances", 1))
    with tp_state(1) as parallel:
        expected = train(name, parallel, LAYOUTS["replicated"], steps=STEPS, **options)
    assert min(expected.grad_norms) > 0.5  # every step clips
    runs = run_ranks(
        train_everywhere,
        world_size,
        tp_size,
        name,
        dict(options, sequence_parallel=sequence_parallel, **place, **shared),
        layouts,
        detail=False,
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for of_rank in runs:
        for layout, run in of_rank.items():
            assert run.losses == pytest.approx(expected.losses, rel=tolerance), layout
            assert run.grad_norms == pytest.approx(expected.grad_norms, rel=10 * tolerance), layout
            assert run.params_norm == pytest.approx(expected.params_norm, rel=10 * tolerance), (
                layout
            )
            for kind in ("grads", "weights") if dtype == torch.float64 else ():
                errors = {
                    key: difference(value, getattr(run, kind)[key])
                    for key, value in getattr(expected, kind).items()
                }
                assert {key: error for key, error in errors.items() if not error < 1e-6} == {}, (
                    layout,
                    kind,
                )
            momentum = {
                key: difference(state["momentum_buffer"], run.states[key]["momentum_buffer"])
                for key, state in expected.states.items()
                if "momentum_buffer" in state
            }
            assert bool(momentum) == mesh.startswith("muon")
            assert max(momentum.values(), default=0.0) < 1e-9


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("rule", ["adam", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "world_size, tp_size, layouts",
    [(2, 1, ("overlap", "zero1", "zero1, overlap")), (3, 1, ("zero1",)), (4, 2, ("zero1",))],
)
def test_zero1_and_overlap_change_no_bit(world_size, tp_size, layouts, dtype, rule):
    """Sums over two ranks are the same in every order. Over three they run in the same order where
    the buckets are as long. The norm is the root of a sum over other parts; without clipping it
    changes nothing."""
    settings = OptimizerConfig(optimizer=rule, clip_grad=0.0)
    # The border of two parts cuts a matrix of llama. Over three ranks its buckets differ in length.
    name = "llama" if rule == "muon" and world_size == 2 else "gpt2"
    options = dict(dtype=dtype, sequence_parallel=tp_size > 1, settings=settings)
    for of_rank in run_ranks(
        train_everywhere, world_size, tp_size, name, options, ("replicated", *layouts), detail=False
    ):
        replicated = of_rank["replicated"]
        for layout in layouts:
            run = of_rank[layout]
            assert differing(replicated, run) == [], layout
            assert (run.losses, run.zeros) == (replicated.losses, replicated.zeros), layout
            assert run.grad_norms == pytest.approx(replicated.grad_norms, rel=1e-6)
            assert (len(run.states["decoder.final_layernorm.weight"]) == 3) == (
                dtype == torch.bfloat16
            )
