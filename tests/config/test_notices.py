"""Notices of settings that do nothing, or less than they say: which there are, and that one
function gives all of a run."""

import json
from pathlib import Path

import pytest

from megatron_lite.config.notices import notices
from megatron_lite.training.summary import here
from tests.support.commands import parsed_line
from tests.support.pairs import in_one_test
from tests.support.runs import tiny_run

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 --vocab-size 99"
)
# Command lines, with the beginning of each notice.
NOTICES = json.loads(Path(__file__).with_name("notices.json").read_text())
TP2 = dict(tensor_model_parallel_size=2)
HASH = "--check-weight-hash-across-dp-replicas-interval compares nothing over data-parallel ranks: "


@in_one_test("words, beginnings", NOTICES)
def test_a_command_line_gives_these_notices_and_no_other(words, beginnings):
    notices = parsed_line(f"{RUN} {words}").notices
    assert len(notices) == len(beginnings)
    assert all(map(str.startswith, notices, beginnings)), notices


@pytest.mark.parametrize(
    "sizes, world_size, fsdp, expected",
    [
        (TP2, 4, False, []),
        ({}, 1, False, [HASH + "there is one"]),
        (dict(pipeline_model_parallel_size=2), 2, False, [HASH + "there is one"]),
        (TP2, 4, True, [HASH + "--use-torch-fsdp2 keeps one copy"]),
    ],
)
def test_a_comparison_of_weights_that_has_nobody_to_compare_says_so(
    sizes, world_size, fsdp, expected
):
    config = tiny_run(
        **sizes, check_weight_hash_across_dp_replicas_interval=2, use_torch_fsdp2=fsdp
    )
    found = notices(config, "log", world_size=world_size)
    assert [line.partition(". ")[0] for line in found] == expected


def test_a_run_has_notices_of_its_settings_its_placement_and_its_kernels():
    config = tiny_run(
        ddp_bucket_size=5,
        use_distributed_optimizer=True,
        check_weight_hash_across_dp_replicas_interval=2,
        recompute_granularity="selective",
        recompute_modules=("core_attn",),
        attention_dropout=0.1,
        attention_backend="auto",
    )
    found = [*notices(config, "settings"), *notices(config, "placement", device="cuda")]
    assert [line.partition(":")[0].partition(" has no")[0] for line in found] == [
        "--ddp-bucket-size",
        "--recompute-modules core_attn saves next to nothing on cuda",
        "--use-distributed-optimizer",
    ]
    assert notices(config, "log", device="cuda", here=here("fp32"))[0].startswith(HASH)
    assert notices(config, "placement", world_size=2) == []


def test_what_16_bits_lose_is_said():
    rounded = dict(main_grads_dtype="bf16", exp_avg_sq_dtype="bf16")
    needed = dict(bf16=True, use_distributed_optimizer=True)
    config = tiny_run(
        **needed, **rounded, use_precision_aware_optimizer=True, global_batch_size=1024
    )
    for ranks, number in ((1, 2), (8, 1)):
        found = notices(config, "formats", world_size=ranks)
        assert [text.split()[0] for text in found] == ["--exp-avg-sq-dtype", "--main-grads-dtype"][
            :number
        ]
