"""An MLP in tiles of the sequence: `mlp/3` in a recompute policy."""

from collections import Counter

import pytest
import torch

from arguments import parse_args
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.recompute.schedule import plan_stage
from tests.memory.peak_cases import CHUNKS, SIZES, Case, policy, rows
from tests.memory.test_collectives import by_kind_and_bytes
from tests.recompute.test_equality import changed
from tests.support.collectives import recorded_collectives
from tests.support.equality import differences, variant_config
from tests.support.models import (
    Layout,
    build_tiny_model,
    loss_and_grads,
    plan_of,
    sample_tokens,
    tp_state,
    with_new_streams,
)
from tests.support.ranks import run_ranks
from tests.support.traffic import plan_collectives

NUM_LAYERS = 3  # not divisible by units of 2
POLICIES = (
    "*:mlp/3",
    "*:layernorm+mlp/3@host",
    "0:core_attn+mlp/3; *:full+mlp/3",
    "*:full/2+mlp/3@host",
)

OTHERS = ({}, dict(recompute_tail_skip=False), dict(recompute_verify=True))


def of_policies(rank, world_size, variant, layout):
    """Returns what is wrong in a layout: bits, bytes, collectives."""
    wrong, first = [], None
    config = variant_config(variant, num_layers=NUM_LAYERS, hidden_dropout=0.1)
    with layout.state() as parallel:
        for text in ("*:none", *POLICIES):
            for others in OTHERS if "full+mlp" in text and layout.ranks == 1 else ({},):
                case = f"{text} {others}"
                plan = plan_stage(RecomputeConfig(recompute_policy=text, **others), NUM_LAYERS)
                parallel = with_new_streams(parallel)
                model = layout.model(config, parallel, plan=plan)
                found = loss_and_grads(model, parallel)
                if text == "*:none":
                    untiled = found
                    break
                first = first or found
                worst = max(differences(untiled, found).values())
                if (bits := changed(first, found)) or worst > 1e-12:
                    wrong.append(f"{case}: {bits} have other bits, {worst} from untiled")
                sizes = layout.sizes(config, torch.float64)
                tokens = sample_tokens(parallel=parallel)
                with (
                    kept_for_backward(exclude=model.parameters()) as meter,
                    recorded_collectives() as forward,
                ):
                    loss = model(*tokens).mean()
                told, kept = activation_bytes(plan, sizes), meter.total_bytes()
                if kept != told:
                    wrong.append(f"{case}: keeps {kept}, not {told}")
                with recorded_collectives() as backward:
                    loss.backward()
                traffic = plan_collectives(plan, sizes)
                for name, sent, expected in (
                    ("forward", forward, traffic.forward),
                    ("backward", backward, (*traffic.backward, *traffic.replay)),
                ):
                    have = by_kind_and_bytes(sent, 8, tokens=0)
                    if have != Counter(expected):
                        wrong.append(f"{case}: {name} sends {have}, not {Counter(expected)}")
    return wrong


@pytest.mark.runs
@pytest.mark.parametrize(
    "variant, layout",
    [
        ("gpt2", Layout()),
        ("deepseek", Layout()),
        ("olmo", Layout(2, True)),
        ("llama", Layout(2)),
        ("pythia", Layout(cp=2)),
    ],
)
def test_bits_bytes_and_collectives_of_tiles(variant, layout):
    """Policies with the same tiles give the same bits, also verified and with the whole tail.
    Against the whole MLP only the sums of weight gradients round otherwise."""
    assert run_ranks(of_policies, layout.ranks, variant, layout) == [[]] * layout.ranks


def test_the_hooks_of_a_parameter_run_once_with_the_whole_gradient():
    """--overlap-grad-reduce sends a gradient from such a hook."""
    with tp_state(1) as parallel:
        plan = plan_of("*:mlp/3", 2)
        model = build_tiny_model(variant_config("gpt2"), parallel, plan=plan)
        seen = {}

        def see(parameter):
            assert parameter not in seen
            seen[parameter] = parameter.grad.clone()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(see)
        model(*sample_tokens()).mean().backward()
        assert all(torch.equal(seen[one], one.grad) for one in model.parameters())


def test_the_transient_peak_falls_by_the_number_of_tiles():
    """Of a wide MLP all but a tile is gone; the prediction follows within its bound."""
    flags = f"{CHUNKS} --num-layers 1 --hidden-size 16 --ffn-hidden-size 4096 --vocab-size 255"
    measured = {}
    for tiles in (1, 2, 8):
        (row,) = rows(Case("", f"{flags} {policy(f'*:mlp/{tiles}')}"))
        assert abs(row.ratio - 1.0) < 0.05, row
        measured[tiles] = row.measured_bytes
    tokens, wide = 256, 4096 * 4
    # each tile less frees its part of fc1's output, of the activation and of a gradient at least
    assert measured[1] - measured[2] >= 2.9 * tokens * wide / 2
    assert measured[2] - measured[8] == pytest.approx((measured[1] - measured[2]) * 3 / 4, rel=0.02)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("*:mlp/7", ["--recompute-policy '*:mlp/7'", "128 rows", "divisor"]),
        ("*:mlp/0", ["tiles", "at least 1", "got 0"]),
        ("*:moe/2", ["moe/2", "mlp/N"]),
        ("*:mlp/2+mlp/4", ["mlp/4"]),
        ("*:full+mlp", ["full"]),
    ],
)
def test_tiles_that_cannot_be_are_refused(flags, words, capsys):
    with pytest.raises(SystemExit):
        parse_args([*SIZES.split(), "--global-batch-size", "2", "--recompute-policy", flags])
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
