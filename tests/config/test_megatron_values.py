"""Megatron's other ways to say a setting become fields, with a notice."""

import json
from types import SimpleNamespace

import pytest

from arguments import parse_args
from megatron_lite.config.megatron_flags import translate_values
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flags_of, run_fields
from tests.support.commands import ended, parsed_line

BASE = (
    "--num-layers 6 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 1 --mock-data --vocab-size 99 --train-iters 2 --lr 1e-3"
)


def parsed(flags):
    return parsed_line(f"{BASE} {flags}")


def fault(flags):
    return ended(parse_args, f"{BASE} {flags}").err


def notices(flags):
    return "\n".join(parsed(flags).notices)


def test_a_hierarchical_exchange_is_read_as_the_ring():
    flags = "--context-parallel-size 2 --attention-dropout 0 --cp-comm-type a2a+p2p"
    assert parsed(flags).config.parallel.cp_comm_type == "p2p"
    assert "--cp-comm-type a2a+p2p is read as p2p" in notices(flags)
    listed = parsed(flags.replace("a2a+p2p", "a2a+p2p" + 5 * " all_gather")).config
    assert listed.parallel.cp_comm_type == ("p2p", *5 * ["allgather"])
    assert RunConfig.from_json(listed.to_json()) == listed
    assert parsed(" ".join(flags_of(listed))).config == listed
    # A file may say how many ranks there are.
    for has_file, kind in ((False, "p2p"), (True, "a2a")):
        given = {"cp_comm_type": ["a2a"]}
        _ = [*translate_values(given, run_fields(), has_file=has_file)]
        assert given["cp_comm_type"] == kind


@pytest.mark.parametrize("needs", ["", "--attention-dropout 0 --reset-attention-mask"])
def test_auto_takes_unfused_attention_where_context_parallelism_has_no_other(needs):
    flags = f"--context-parallel-size 2 {needs}"
    assert parsed(flags).config.model.attention_backend == "unfused"
    assert "--attention-backend auto is unfused" in notices(flags)
    plain = parsed("--context-parallel-size 2 --attention-dropout 0")
    assert plain.config.model.attention_backend == "auto"


def test_the_name_of_a_norm_may_be_lower_case():
    assert parsed("--normalization rmsnorm").config.model.normalization == "RMSNorm"


@pytest.mark.parametrize(
    "strategy, field",
    [
        ("optim_grads_params", "use_torch_fsdp2"),
        ("optim_grads", "use_distributed_optimizer"),
        ("optim", "use_distributed_optimizer"),
        ("no_shard", None),
    ],
)
def test_megatron_fsdp_becomes_what_shares_out_the_same(strategy, field):
    flags = (
        f"--use-megatron-fsdp --use-distributed-optimizer "
        f"--data-parallel-sharding-strategy {strategy}"
    )
    data_parallel = parsed(flags).config.data_parallel
    switches = {"use_torch_fsdp2", "use_distributed_optimizer"}
    on = {name for name in switches if getattr(data_parallel, name)}
    # --use-distributed-optimizer is given too; FSDP2 takes its place.
    assert on == {field or "use_distributed_optimizer"}
    assert f"--use-megatron-fsdp with {strategy}" in notices(flags)


def test_an_unknown_strategy_is_refused():
    error = fault("--use-megatron-fsdp --data-parallel-sharding-strategy all")
    assert "--data-parallel-sharding-strategy must be one of no_shard" in error


EMBEDDING, LOSS = (f"--account-for-{name}-in-pipeline-split" for name in ("embedding", "loss"))


def test_the_embedding_and_the_loss_count_as_layers():
    """As in megatron-core's get_num_layers_to_build."""
    config = parsed(f"--pipeline-model-parallel-size 4 {EMBEDDING} {LOSS}").config
    assert config.stage_lengths() == [1, 2, 2, 1]
    for switch in (EMBEDDING, LOSS):  # 7 layers over 4 ranks
        error = fault(f"--pipeline-model-parallel-size 4 {switch}")
        assert "are not divisible by --pipeline-model-parallel-size 4" in error


@pytest.mark.parametrize("given", ["", "--num-layers 7", "--pipeline-model-parallel-size 4"])
def test_an_accounted_embedding_needs_the_sizes_on_the_command_line(given, tmp_path):
    """With a file the sizes are known too late, and the switch would have no effect in silence."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"parallel": {"pipeline_model_parallel_size": 4}}))
    error = ended(parse_args, f"--config-json {file} {given} {LOSS}").err
    assert "needs --num-layers and --pipeline-model-parallel-size on the command line" in error


@pytest.mark.parametrize(
    "size, virtual, number, layers, counted",
    [
        (4, "--num-virtual-stages-per-pipeline-rank 2", 2, 6, (EMBEDDING, LOSS)),
        (2, "--num-layers-per-virtual-pipeline-stage 2", 2, 6, (EMBEDDING, LOSS)),
        (2, "--num-virtual-stages-per-pipeline-rank 3", 3, 11, (EMBEDDING,)),
        (2, "--num-virtual-stages-per-pipeline-rank 2", 2, 7, (LOSS,)),
    ],
)
def test_the_embedding_and_the_loss_count_as_layers_of_virtual_stages(
    size, virtual, number, layers, counted
):
    """As in megatron-core's get_num_layers_to_build."""
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    theirs = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=number,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=EMBEDDING in counted,
        account_for_loss_in_pipeline_split=LOSS in counted,
    )
    words = f"--num-layers {layers} --pipeline-model-parallel-size {size} {virtual}"
    config = parsed(f"{words} {' '.join(counted)}").config
    for rank in range(size):
        expected = [
            block.get_num_layers_to_build(theirs, vp_stage=i, pp_rank=rank) for i in range(number)
        ]
        assert [stage.num_layers for stage in config.stages_of_rank(rank)] == expected


def test_virtual_stages_that_cannot_count_the_embedding_are_refused():
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3"
    assert "into equal virtual stages on 2 ranks" in fault(f"{stages} {EMBEDDING} {LOSS}")
