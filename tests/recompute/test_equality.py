"""No policy changes a bit: loss and every gradient torch.equal to keeping everything, over two
accumulated micro-batches."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.replay import RecomputeMismatch
from megatron_lite.recompute.schedule import plan_stage
from tests.support.equality import GATHERED, LLAMA, SENT, variant_config
from tests.support.models import Layout, loss_and_grads, tiny_config, with_new_streams
from tests.support.pairs import FULL_GRIDS, sampled
from tests.support.ranks import run_ranks

MODULE_SETS = [
    ("layernorm",),
    ("mlp",),
    ("activation",),
    ("core_attn", "mlp"),
    ("layernorm", "activation"),
    ("core_attn", "layernorm", "activation"),
    ("core_attn", "layernorm", "mlp"),
    ("pointwise",),
]
NUM_LAYERS = 5  # not divisible by the units of 2 and 3
MODELS = {
    "gpt, unfused, dropout": tiny_config(
        num_layers=NUM_LAYERS, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "llama, SDPA, residual dropout": tiny_config(
        num_layers=NUM_LAYERS,
        hidden_dropout=0.1,
        swiglu=True,
        qk_layernorm=True,
        position_embedding_type="rope",
        normalization="RMSNorm",
    ),
    "gpt, SDPA, no dropout": tiny_config(num_layers=NUM_LAYERS),
    "gqa, squared relu, unfused": tiny_config(
        num_layers=NUM_LAYERS,
        group_query_attention=True,
        num_query_groups=2,
        squared_relu=True,
        attention_backend="unfused",
        add_bias_linear=False,
    ),
}
# Layers with and without a window and rotary embedding share a unit; norms after a branch; a
# parallel residual.
DIFFERING = dict(
    LLAMA,
    num_layers=NUM_LAYERS,
    window_size=(3, 0),
    window_attn_skip_freq=(1, 0, 1, 1, 0),
    no_rope_freq=(0, 1, 1, 0, 0),
)
DIFFERING_MODELS = {
    "SDPA, residual dropout": tiny_config(**DIFFERING, hidden_dropout=0.1),
    "unfused, dropout, query groups": tiny_config(
        **DIFFERING,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        group_query_attention=True,
        num_query_groups=2,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=1.5,
    ),
}
OTHER_MODELS = DIFFERING_MODELS | {
    name: variant_config(name, num_layers=NUM_LAYERS, hidden_dropout=0.1, attention_dropout=0.1)
    for name in ("olmo", "pythia")
}
# Routers, a shared expert with a gate, dense layers between those with experts.
EXPERT_MODELS = {
    name: variant_config(name, num_layers=NUM_LAYERS, hidden_dropout=0.1, **settings)
    for name, settings in {
        "mixtral": dict(moe_layer_freq=(1, 1, 0, 1, 1)),
        "deepseek": dict(moe_layer_freq=2, moe_router_dtype=None, norm_position="after"),
    }.items()
}
EXPERT_MODULES = [
    ("moe", "mla_up_proj", "core_attn"),
    ("moe_act", "shared_experts", "layernorm", "mla_up_proj"),
    ("moe", "mlp", "pointwise"),
]
# One of each kind: units, split units, regions, operators, host memory, and a verified replay.
ONE_OF_EACH_KIND = {
    "uniform 2",
    "uniform 2 split",
    "core_attn+layernorm+mlp",
    "pointwise, verified",
    "*:ops(matmul/2,attention,collective)",
    "0:full/2; 1:none; *:ops(matmul)@host",
}
AUTOCAST = "autocast"
ON_HOST = ("*:full@host", "*:none@host", "*:pointwise@host", "0:full/2; 1:none; *:ops(matmul)@host")
OPS = ("*:ops(matmul)", "*:ops(matmul,attention)@host", "*:ops(matmul/2,attention,collective)")


def policies(*, can_split, module_sets=MODULE_SETS):
    """Every policy of Megatron's flags that is legal in the layout, and policies that keep the
    results of operators, or keep something in host memory or in one allocation."""
    named = {"core_attn": RecomputeConfig(recompute_activations=True)}
    for modules in module_sets:
        named["+".join(modules)] = RecomputeConfig(
            recompute_granularity="selective", recompute_modules=modules
        )
    for method, counts in (("uniform", (1, 2, 3)), ("block", (1, 3, NUM_LAYERS + 4))):
        for count in counts:
            for split in (False, True) if can_split else (False,):
                named[f"{method} {count}{' split' if split else ''}"] = RecomputeConfig(
                    recompute_granularity="full",
                    recompute_method=method,
                    recompute_num_layers=count,
                    distribute_saved_activations=split,
                )
    named |= {policy: RecomputeConfig(recompute_policy=policy) for policy in (*OPS, *ON_HOST)}
    for policy in (
        ("*:full/2@split", "*:full/2@split+host") if can_split else ("*:full/2", "*:full@host")
    ):
        named[f"{policy}, contiguous"] = RecomputeConfig(
            recompute_policy=policy, contiguous_saved_activations=True
        )
        named[policy] = RecomputeConfig(recompute_policy=policy)
    for name in ("uniform 2", "core_attn+layernorm+mlp", "pointwise", OPS[-1]):
        named[f"{name}, whole tail"] = replace(named[name], recompute_tail_skip=False)
        named[f"{name}, verified"] = replace(named[name], recompute_verify=True)
    named["*:pointwise@host, verified"] = replace(named["*:pointwise@host"], recompute_verify=True)
    return named


def changed(expected, outcome):
    """Names of what is not equal to the bit."""
    names = [
        name for name, grad in expected.grads.items() if not torch.equal(grad, outcome.grads[name])
    ]
    return names if torch.equal(expected.loss, outcome.loss) else ["loss", *names]


def policies_of(layout, precision):
    """The policies of each model. Each policy has one of the models, by turns.

    In the weekly run in float32 on one rank it has all. In the default run other settings have
    every second policy, and with sequence parallelism the other half.
    """
    named = list(policies(can_split=layout.can_split))
    models = list(MODELS)[: 4 // layout.tp]
    turns, is_first = len(models), (layout.tp, precision) == (1, torch.float32)
    if FULL_GRIDS and is_first:
        turns = 1
    elif not FULL_GRIDS and not is_first:
        named = named[layout.sequence_parallel :: 2]
    return {model: named[number % turns :: turns] for number, model in enumerate(models)}


def faults(rank, world_size, layout, precision, chosen, models, fields):
    """{model and policy: what it changed}, empty if nothing did. chosen: policies by name of a
    model. fields: further ones of ParallelConfig."""
    found = {}
    dtype = torch.float32 if precision == AUTOCAST else precision
    named = policies(can_split=layout.can_split, module_sets=(*MODULE_SETS, *EXPERT_MODULES))
    with layout.state(**fields) as parallel:
        for model_name, of_model in chosen.items():
            config, outcomes = models[model_name], {}
            for name, recompute in {
                "none": RecomputeConfig(),
                **{name: named[name] for name in of_model},
            }.items():
                fresh = with_new_streams(parallel)
                plan = plan_stage(recompute, config.num_layers)
                model = layout.model(config, fresh, dtype=dtype, plan=plan)
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST):
                    try:
                        outcomes[name] = loss_and_grads(model, fresh)
                    except RecomputeMismatch as mismatch:
                        found[f"{model_name}: {name}"] = [str(mismatch)]
                        continue
                if differences := changed(outcomes["none"], outcomes[name]):
                    found[f"{model_name}: {name}"] = differences
    return found


ALONE, TP2, SEQUENCE_PARALLEL = Layout(), Layout(2), Layout(2, True)
SETTINGS = [
    (ALONE, torch.float32),
    (ALONE, torch.bfloat16),
    (ALONE, torch.float16),
    (ALONE, AUTOCAST),
    (TP2, torch.float32),
    (SEQUENCE_PARALLEL, torch.bfloat16),
    (SEQUENCE_PARALLEL, torch.float32),
    (TP2, torch.bfloat16),
    (SEQUENCE_PARALLEL, torch.float16),
    (Layout(4, True), torch.float32),
]


def check(layout, precision, chosen, models, *, num_ranks=None, **fields):
    num_ranks = num_ranks or layout.ranks
    found = run_ranks(faults, num_ranks, layout, precision, chosen, models, fields)
    assert found == [{}] * num_ranks


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("layout, precision", SETTINGS)
def test_gradients_are_unchanged_to_the_bit(layout, precision):
    """Every policy with every precision on one rank and on several."""
    check(layout, precision, policies_of(layout, precision), MODELS)


@pytest.mark.runs
@pytest.mark.parametrize(
    "layout, precision, names",
    [
        (ALONE, torch.float32, [*DIFFERING_MODELS]),
        (ALONE, torch.bfloat16, ["olmo", "pythia"]),
        (SEQUENCE_PARALLEL, torch.float32, ["olmo", "pythia"]),
        (TP2, torch.float32, [*OTHER_MODELS]),
        (SEQUENCE_PARALLEL, torch.bfloat16, [*OTHER_MODELS]),
    ],
)
def test_gradients_of_layers_that_differ_are_unchanged_to_the_bit(layout, precision, names):
    chosen = [
        name
        for name in policies(can_split=layout.can_split)
        if name in ONE_OF_EACH_KIND or (FULL_GRIDS and len(names) > 2)
    ]
    assert len(chosen) > 4
    check(layout, precision, dict.fromkeys(names, chosen), OTHER_MODELS)


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize("layout, precision", [SETTINGS[0], *SETTINGS[3:7]])
def test_gradients_of_experts_are_unchanged_to_the_bit(layout, precision):
    named = policies(can_split=layout.can_split, module_sets=(*MODULE_SETS, *EXPERT_MODULES))
    kinds = [name for name in named if name in ONE_OF_EACH_KIND or "moe" in name]
    chosen = dict.fromkeys(EXPERT_MODELS, list(named) if FULL_GRIDS else kinds)
    check(layout, precision, chosen, EXPERT_MODELS)


EXPERT_LAYOUTS = {
    "ep2": (ALONE, dict(SENT, num_ranks=2)),
    "ep2, all tokens gathered": (ALONE, dict(GATHERED, num_ranks=2)),
    "ep2, tp2 shares no expert": (SEQUENCE_PARALLEL, dict(SENT, expert_tensor_parallel_size=1)),
    "ep2 x tp2": (SEQUENCE_PARALLEL, dict(SENT, num_ranks=4)),
    "ep2, tp4 shares in twos": (Layout(4, True), dict(SENT, expert_tensor_parallel_size=2)),
}


@pytest.mark.runs
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_gradients_of_spread_experts_are_unchanged_to_the_bit(layout):
    """A replay sends every row to the rank that had it in the forward, and asks for no counts."""
    place, fields = EXPERT_LAYOUTS[layout]
    name = "deepseek" if layout == "ep2" else "mixtral"
    noisy = dict(moe_input_jitter_eps=0.2, moe_expert_capacity_factor=0.9)
    noisy["add_bias_linear"] = name == "mixtral"
    models = {name: replace(EXPERT_MODELS[name], num_layers=3, moe_layer_freq=(1, 0, 1), **noisy)}
    chosen = [*map("+".join, EXPERT_MODULES[:2]), "uniform 2", "pointwise, verified", *OPS[2:]]
    check(place, torch.float32, {name: chosen}, models, **fields)


CONTEXT_MODELS = {
    "gpt": MODELS["gpt, SDPA, no dropout"],
    "llama": replace(
        MODELS["llama, SDPA, residual dropout"], group_query_attention=True, num_query_groups=2
    ),
    "latents": EXPERT_MODELS["deepseek"],
    "unfused": MODELS["gpt, unfused, dropout"],
}


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "layout, name, precision",
    [
        (Layout(cp=2), "gpt", torch.float32),
        (Layout(cp=2), "latents", torch.float32),
        (Layout(2, True, 2, "a2a"), "latents", torch.bfloat16),
        (Layout(cp=2, cp_comm_type="allgather"), "latents", torch.bfloat16),
        (Layout(cp=2, cp_comm_type="allgather"), "llama", torch.bfloat16),
        (Layout(cp=2), "unfused", torch.float32),
        (Layout(2, True, 2), "llama", torch.float32),
        (Layout(2, cp=2, cp_comm_type="allgather"), "gpt", torch.bfloat16),
        (Layout(cp=2, cp_comm_type="a2a"), "unfused", torch.float32),
    ],
)
def test_gradients_of_shared_sequences_are_unchanged_to_the_bit(layout, name, precision):
    """Four ranks run every second of the policies: they are slow."""
    named = list(policies(can_split=layout.can_split))[:: 2 if layout.ranks == 4 else 1]
    models = {name: replace(CONTEXT_MODELS[name], num_layers=3)}
    check(layout, precision, {name: sampled(named, every=5, at_most=2)}, models)
