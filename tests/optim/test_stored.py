"""States in less than float32, or in host memory: an update computes in float32 and rounds once,
every copy has arrived before it is read, and what is stored loads into every other format.
Skipped steps of every update rule."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config import optimizer_settings
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.optim import adam_update
from megatron_lite.optim.layouts import Piece
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.stored import new_state, noise, whole, write_, write_whole_
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.rng import RngStreams
from tests.optim.test_muon import Prescribed, step
from tests.optim.test_optimizer import CONFIG, Plain, float32_sum_of_gradients, step_with, torchs
from tests.support.models import tp_state
from tests.support.saves import same, state_of
from tests.support.uncompiled import NEEDS_COMPILER, uncompiled_kernels

RATES = (0.01, 0.02, 0.0, 0.015, 0.01)
BF16 = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
FP16 = dict(exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16", main_params_dtype="fp16")
MIXED = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16", main_grads_dtype="bf16")
HOST = dict(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)


def in_float16(values):
    """The largest value comes to lie in [2^14, 2^15)."""
    scale = 2.0 ** (math.frexp(values.abs().max().item())[1] - 15)
    return (values.double() / scale).half().double().mul(scale).float()


ROUND = {
    "fp32": lambda values: values,
    "bf16": lambda values: values.bfloat16().float(),
    "fp16": in_float16,
}


def optimizer_of(model, parallel, kernels=None, **settings):
    rounds = any(key.endswith("_dtype") for key in settings)
    rule = {} if "sgd_momentum" in settings else CONFIG
    config = OptimizerConfig(
        **{"clip_grad": 0.0, **rule, **settings}, use_precision_aware_optimizer=rounds
    )
    sharding = DataParallelConfig(use_distributed_optimizer=True)
    return Optimizer(model, config, parallel, sharding, kernels=kernels)


def skip(model, optimizer, fault):
    """Makes a step with a fault in one gradient, which must be skipped."""
    optimizer.zero_grad()
    model.loss(9).backward()
    next(iter(optimizer.layout.gradients.grads.values()))[2] = fault
    assert optimizer.step(0.1).skipped.item() == 1.0


UPDATES = [
    (formats, dtype)
    for formats in (BF16, dict(BF16, main_grads_dtype="bf16"))
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(
    "formats, dtype, is_compiled",
    [
        *((*one, False) for one in UPDATES),
        pytest.param(*UPDATES[0], True, marks=[pytest.mark.long, NEEDS_COMPILER]),
        *(
            pytest.param(*one, True, marks=[pytest.mark.weekly, NEEDS_COMPILER])
            for one in UPDATES[1:]
        ),
    ],
)
def test_a_compiled_update_is_the_eager_one(formats, dtype, is_compiled, monkeypatch):
    """To the rounding of one product, small pieces too; a skipped step changes nothing."""
    if not is_compiled:
        uncompiled_kernels(monkeypatch)
    monkeypatch.setattr(optimizer_settings, "SMALL", 4)
    kernels, models = CompiledKernels(), (Plain(dtype), Plain(dtype))
    with tp_state(1) as parallel:
        optimizers = [
            optimizer_of(model, parallel, one, **formats)
            for model, one in zip(models, (None, kernels), strict=True)
        ]
        for number, rate in enumerate(RATES):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, number, rate)
            eager, compiled = map(state_of, models, optimizers)
            for key, value in eager.items():
                tolerance = 2.0**-7 if value.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(compiled[key], value, rtol=tolerance, atol=1e-8)
        assert kernels.num_graphs
        skip(models[1], optimizers[1], math.nan)
        assert same(state_of(models[1], optimizers[1]), compiled)


@pytest.mark.parametrize("place", [{}, HOST])
@pytest.mark.parametrize(
    "formats, part",
    [(BF16, 2**24), (FP16, 2**24), (MIXED, 2**24), (dict(BF16, main_grads_dtype="bf16"), 20)],
)
def test_an_update_is_torchs_of_what_was_stored_and_is_rounded_once(
    formats, part, place, monkeypatch
):
    """The oracle is torch.optim.AdamW in float32, whose state this test rounds between two steps.
    The model computes with the main weights before they are rounded to float16.

    part: the most elements that are updated together; a small one cuts weights, and joins others.
    """
    monkeypatch.setattr(optimizer_settings, "PART", part)
    model, masters = Plain(torch.bfloat16), Plain(torch.bfloat16).float()
    reference = torchs(masters, fused=True)
    main = ROUND[formats.get("main_params_dtype", "fp32")]
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.copy_(main(parameter))
    with tp_state(1) as parallel:
        optimizer = optimizer_of(model, parallel, **formats, **place)
        for number, rate in enumerate(RATES):
            batches = (2 * number, 2 * number + 1)
            if "main_grads_dtype" in formats:
                one, two = (float32_sum_of_gradients(model, [batch]) for batch in batches)
                grads = {key: (one[key].bfloat16() + two[key].bfloat16()).float() for key in one}
            else:
                grads = float32_sum_of_gradients(model, batches)
            optimizer.zero_grad()
            for batch in batches:
                model.loss(batch).backward()
            optimizer.step(rate)
            step_with(masters, reference, grads, rate)
            for name, parameter in masters.named_parameters():
                assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name
                with torch.no_grad():
                    parameter.copy_(main(parameter))
                held = optimizer.whole_states(name)
                assert torch.equal(held["master"], parameter), name
                for key in ("exp_avg", "exp_avg_sq"):
                    state = reference.state[parameter]
                    state[key] = ROUND[formats[f"{key}_dtype"]](state[key])
                    assert torch.equal(held[key], state[key]), (name, key)


@pytest.mark.parametrize("writer", [{}, BF16, FP16, dict(BF16, **HOST)])
@pytest.mark.parametrize("reader", [{}, BF16, FP16, dict(FP16, **HOST), HOST])
def test_states_load_across_formats_and_places(writer, reader):
    """What a checkpoint holds is rounded to the reader's format, once; the same format goes on with
    the same bits."""
    with tp_state(1) as parallel:
        models = [Plain(torch.bfloat16), Plain(torch.bfloat16)]
        first, second = (
            optimizer_of(model, parallel, **settings)
            for model, settings in zip(models, (writer, reader), strict=True)
        )
        for number in range(3):
            step(models[0], first, number, 0.01)
        states = {
            name: {key: one.clone() for key, one in first.whole_states(name).items()}
            for name, _ in models[0].named_parameters()
        }
        for name, parameter in models[0].named_parameters():
            second.set_weight(name, parameter.detach())
        second.load(copy.deepcopy(states), num_updates=first.num_updates)
        for name, saved in states.items():
            loaded = second.whole_states(name)
            for key, value in saved.items():
                field = "main_params_dtype" if key == "master" else f"{key}_dtype"
                rounded = ROUND[reader.get(field, "fp32")](value)
                assert torch.equal(loaded[key], rounded), (name, key)
        formats = [{k: v for k, v in one.items() if k not in HOST} for one in (writer, reader)]
        if formats[0] == formats[1]:
            for model, optimizer in zip(models, (first, second), strict=True):
                step(model, optimizer, 7, 0.01)
            assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_what_is_read_is_stored_again_as_it_was():
    """Also if float16 rounds the largest value up to a power of two."""
    state = new_state(torch.zeros(2), "fp16", torch.device("cpu"))
    write_(state, slice(0, 2), torch.tensor([0.99999, 3 * 2.0**-39]))
    first = whole(state).clone()
    write_whole_(state, first)
    assert torch.equal(whole(state), first)


def test_a_random_rounding_is_to_a_neighbour_and_the_value_itself_in_the_mean():
    """Of 2^16 copies each, within 6 sigma of at most half a distance. Float16 has the first two
    values as they are; the last one lies between two of its subnormal numbers."""
    values = torch.tensor([[0.875], [0.0], [0.5003], [-0.7501], [3e-9]]).expand(-1, 2**16)
    state, update = new_state(values, "fp16", torch.device("cpu")), torch.tensor(7.0)
    chances = noise(5, update, 100, values)
    assert torch.equal(noise(5, update, 140, values[0]), chances[40 : 40 + 2**16])
    write_(state, slice(0, values.numel()), values.reshape(-1), chances)
    off, distance = whole(state) - values, torch.tensor([0.0, 0.0, 2.0**-11, 2.0**-11, 2.0**-38])
    assert (off.abs().amax(1) <= distance).all()
    assert (off.double().mean(1).abs() <= 6 * distance / 2 / 2**8).all()


def test_small_updates_add_up_if_rounding_is_random():
    """64 updates by 1/49 of the distance of two numbers, which the nearest one would lose: the mean
    and the spread of 4096 weights are those of independent roundings."""
    weight, rate, distance = torch.full((4096,), 0.75, dtype=torch.bfloat16), 1e-5, 2.0**-11
    config = OptimizerConfig(
        use_precision_aware_optimizer=True,
        main_params_dtype="fp16",
        stochastic_rounding=True,
        weight_decay=0.0,
    )
    master = new_state(weight, "fp16", weight.device)
    write_whole_(master, weight)
    spec = ParameterSpec(global_shape=(1,))
    piece = Piece("w", spec, 0, weight, master, {}, torch.ones(4096), apart=True)
    both = SimpleNamespace(pieces=[piece], link=None, rng=RngStreams(weight.device, seed=3))
    rule = adam_update.AdamW(both, config, both)
    for _ in range(64):
        rule.step(rate, rate, torch.tensor(0.0))
    moved = (0.75 - whole(master)).double()
    spread = math.sqrt(64 * rate * (distance - rate))
    assert moved.mean().item() == pytest.approx(64 * rate, abs=6 * spread / 64)
    assert moved.std().item() == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("impl", ["adam", "muon", "sgd", "rounded"])
@pytest.mark.parametrize(
    "fault, bad_steps", [(math.inf, (0,)), (math.nan, (1, 2)), (math.inf, (0, 1, 3))]
)
def test_skipped_steps_change_nothing_and_do_not_count(impl, fault, bad_steps):
    """Bias correction would tell a step that counts: the first update is as large at every learning
    rate. A bfloat16 weight was rounded from the main weight before that was stored in float16."""
    with tp_state(1) as parallel:
        kind = Prescribed if impl == "muon" else Plain
        rounded = impl == "rounded"
        settings = dict(clip_grad=0.05, **(FP16 if rounded else dict(optimizer=impl)))
        model, undisturbed = (kind(torch.bfloat16 if rounded else torch.float32) for _ in range(2))
        ours, theirs = (optimizer_of(one, parallel, **settings) for one in (model, undisturbed))
        for number in range(5):
            if number in bad_steps:
                before = state_of(model, ours)
                skip(model, ours, fault)
                assert same(state_of(model, ours), before)
            else:
                for one, optimizer in ((model, ours), (undisturbed, theirs)):
                    step(one, optimizer, number, 0.1)
        assert ours.num_updates == theirs.num_updates == 5 - len(bad_steps)
    assert same(state_of(model, ours), state_of(undisturbed, theirs))
