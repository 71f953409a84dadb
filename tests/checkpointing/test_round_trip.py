"""Weights and optimizer states go through any layout of ranks and come back in every bit."""

import pytest
from safetensors.torch import load_file

from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run
from tests.support.saves import same, train

ITERATIONS = 3
TP2, PP2 = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)
INSTANCES = dict(num_distributed_optimizer_instances=2)
# ranks, and the settings in which the runs differ
LAYOUTS = {
    "one rank": (1, {}),
    "one rank, 99 rows and no padding": (
        1,
        dict(recompute_policy="*:full", make_vocab_size_divisible_by=1),
    ),
    "TP 2, sequence parallel, DP 2, ZeRO-1": (
        4,
        dict(TP2, sequence_parallel=True, use_distributed_optimizer=True),
    ),
    "TP 4, 256 rows": (4, dict(tensor_model_parallel_size=4, recompute_policy="*:core_attn+mlp")),
    "TP 2, 100 rows": (2, dict(TP2, make_vocab_size_divisible_by=5)),
    "PP 2": (2, dict(PP2, recompute_policy="*:full")),
    "PP 2, interleaved, TP 2": (4, dict(PP2, **TP2, num_virtual_stages_per_pipeline_rank=2)),
    "PP 2, empty stages": (2, dict(PP2, pipeline_model_parallel_layout="E||tt|ttL")),
    "PP 2, one layer first": (2, dict(PP2, decoder_first_pipeline_num_layers=1)),
    "CP 2": (2, dict(context_parallel_size=2)),
    "DP 2, FSDP2": (2, dict(use_torch_fsdp2=True, recompute_policy="every-2:full")),
    "DP 4, ZeRO-1, 2 instances": (4, dict(INSTANCES, use_distributed_optimizer=True)),
    "DP 4, FSDP2, 2 instances": (4, dict(INSTANCES, use_torch_fsdp2=True)),
    "DP 4": (4, {}),
}
HERE = "TP 2, sequence parallel, DP 2, ZeRO-1"


def config_of(layout, untied, **checkpoint):
    return tiny_run(
        num_layers=4,
        attention_dropout=0.0,
        swiglu=True,
        ffn_hidden_size=24,
        untie_embeddings_and_output_weights=untied,
        train_iters=ITERATIONS,
        eval_iters=0,
        bf16=True,
        **LAYOUTS[layout][1],
        **checkpoint,
    )


def tensors(folder):
    step = folder / f"iter_{ITERATIONS:07d}"
    return {
        kind: load_file(step / f"{kind}_pp00_tp00of01.safetensors")
        for kind in ("model", "optimizer")
    }


@pytest.fixture(scope="module", params=[False, True])
def saved(request, tmp_path_factory):
    """Trained in one layout, and written again by one rank: the reference."""
    folder, untied = tmp_path_factory.mktemp("saved"), request.param
    there = folder / "there"
    assert not any(run_ranks(train, LAYOUTS[HERE][0], config_of(HERE, untied, save=there)))
    run_to_end(config_of("one rank", untied, load=there, save=folder / "here"))
    return folder


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_a_layout_and_back_no_bit_changes(tmp_path, saved, layout, request, capsys):
    """Nothing is trained: each run loads the last iteration and writes it again."""
    there, back = tmp_path / "there", tmp_path / "back"
    ranks, untied = LAYOUTS[layout][0], request.node.callspec.params["saved"]
    config = config_of(layout, untied, load=saved / "there", save=there)
    assert not any(run_ranks(train, ranks, config))
    capsys.readouterr()
    run_to_end(config_of("one rank", untied, load=there, save=back))
    told = "random-number streams (dropout) start from --seed" in capsys.readouterr().out
    assert told == (ranks > 1)
    expected, found = tensors(saved / "here"), tensors(back)
    assert any(name.endswith("/master") for name in expected["optimizer"])
    assert expected["model"]["embedding.word_embeddings.weight"].shape == (99, 32)
    for kind, values in expected.items():
        assert same(found[kind], values) and any(value.any() for value in values.values())
