"""`--config-json FILE` and a flag that is an alternative to what the file says: the flag wins, and
says what it replaces."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from arguments import ParsedArguments, build_parser, parse_args
from megatron_lite.config.alternatives import (
    ALTERNATIVES,
    BELONGS_TO,
    BELONGS_TO_VALUE,
    NEEDS_MORE_THAN_ONE,
)

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 9 "
)
BASE_HF = BASE.replace(
    "--vocab-size 9", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model m "
)
BASE_BPE = BASE.replace("--vocab-size 9", "--vocab-file v --merge-file m ")
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 3 "

# What the file was dumped from, flags given with it, and flags that give the same run without a
# file.
CASES = [
    (BASE + FULL, "--recompute-policy 0:mlp", "--recompute-policy 0:mlp"),
    (
        BASE + FULL + "--contiguous-saved-activations",
        "--recompute-policy *:mlp",
        "--recompute-policy *:mlp",
    ),
    (
        BASE + FULL + "--contiguous-saved-activations",
        "--recompute-policy 1:full",
        "--recompute-policy 1:full --contiguous-saved-activations",
    ),
    (
        BASE + FULL + "--recompute-verify",
        "--recompute-policy *:mlp",
        "--recompute-policy *:mlp --recompute-verify",
    ),
    (
        BASE + FULL + "--tensor-model-parallel-size 2 --distribute-saved-activations",
        "--recompute-policy *:full",
        "--tensor-model-parallel-size 2 --recompute-policy *:full",
    ),
    (BASE + "--recompute-activations", "--recompute-policy *:full", "--recompute-policy *:full"),
    (
        BASE + "--recompute-granularity selective --recompute-modules mlp layernorm",
        "--recompute-policy *:full",
        "--recompute-policy *:full",
    ),
    (
        BASE + "--torch-compile --activation-memory-budget 0.5",
        "--recompute-policy *:full",
        "--torch-compile --recompute-policy *:full",
    ),
    (
        BASE + "--recompute-policy *:full --contiguous-saved-activations",
        "--torch-compile --activation-memory-budget 0.5",
        "--torch-compile --activation-memory-budget 0.5",
    ),
    (
        BASE + "--pipeline-model-parallel-size 2 --recompute-policy *:full "
        "--num-microbatches-with-partial-activation-checkpoints 1",
        "--recompute-policy *:none",
        "--pipeline-model-parallel-size 2 --recompute-policy *:none",
    ),
    (BASE + "--recompute-policy *:mlp", FULL, FULL),
    (BASE + "--recompute-policy *:mlp", "--recompute-activations", "--recompute-activations"),
    (
        BASE + FULL + "--contiguous-saved-activations",
        "--recompute-activations",
        "--recompute-activations",
    ),
    (
        BASE + FULL,
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity selective --recompute-modules mlp",
    ),
    (BASE + "--recompute-activations", FULL, FULL),
    (BASE + FULL, "--recompute-num-layers 3", FULL.replace("2", "3")),
    (BASE + FULL, "--recompute-method block", FULL.replace("uniform", "block")),
    (BASE + "--train-iters 5", "--train-samples 40", "--train-samples 40"),
    (BASE + "--train-samples 40", "--train-iters 5", "--train-iters 5"),
    (
        BASE + "--train-iters 5 --lr-warmup-iters 2 --lr-decay-iters 4",
        "--train-samples 40 --lr-warmup-samples 8 --lr-decay-samples 24",
        "--train-samples 40 --lr-warmup-samples 8 --lr-decay-samples 24",
    ),
    (BASE + "--lr-warmup-iters 2", "--lr-warmup-fraction 0.1", "--lr-warmup-fraction 0.1"),
    (BASE + "--lr-warmup-fraction 0.1", "--lr-warmup-iters 2", "--lr-warmup-iters 2"),
    (BASE + WSD, "--lr-decay-style cosine", "--lr-decay-style cosine"),
    (
        BASE + WSD,
        "--train-samples 40 --lr-wsd-decay-samples 8",
        "--lr-decay-style WSD --train-samples 40 --lr-wsd-decay-samples 8",
    ),
    (
        BASE + "--optimizer muon --muon-nesterov --muon-no-split-qkv",
        "--optimizer adam",
        "--optimizer adam",
    ),
    (BASE + "--mock-data", "--data-path a b", "--data-path a b"),
    (BASE + "--data-path a b", "--mock-data", "--mock-data"),
    (BASE + "--fp16 --initial-loss-scale 16", "--bf16", "--bf16"),
    (BASE + "--bf16 --grad-reduce-in-bf16", "--fp16", "--fp16"),
    (
        BASE + "--fp16 --initial-loss-scale 16 --hysteresis 3",
        "--loss-scale 8",
        "--fp16 --loss-scale 8",
    ),
    (BASE + "--fp16 --loss-scale 8", "--initial-loss-scale 16", "--fp16 --initial-loss-scale 16"),
    (BASE + "--swiglu", "--squared-relu", "--squared-relu"),
    (
        BASE + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    (
        BASE + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 1",
        "",
    ),
    (
        BASE + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--use-torch-fsdp2",
        "--use-torch-fsdp2 --overlap-grad-reduce",
    ),
    (
        BASE + "--use-torch-fsdp2 --fsdp-memory-efficient-wrapping",
        "--use-distributed-optimizer",
        "--use-distributed-optimizer",
    ),
    (
        BASE + FULL + "--tensor-model-parallel-size 2 --distribute-saved-activations",
        "--sequence-parallel",
        FULL + "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    (
        BASE + FULL + "--tensor-model-parallel-size 2 --distribute-saved-activations",
        "--tensor-model-parallel-size 1",
        FULL,
    ),
    (
        BASE + "--context-parallel-size 2 --cp-comm-type allgather --attention-dropout 0",
        "--context-parallel-size 1",
        "--attention-dropout 0",
    ),
    (BASE_HF, "--tokenizer-type NullTokenizer --vocab-size 9", ""),
    (BASE, "--vocab-file v --merge-file m", BASE_BPE),
    (
        BASE_BPE + "--vocab-size 20",
        "--vocab-file w",
        BASE_BPE.replace("file v", "file w") + "--vocab-size 20",
    ),
    (BASE_BPE, "--tokenizer-type HuggingFaceTokenizer --tokenizer-model m", BASE_HF),
]


def dumped(words: str, folder: Path) -> list[str]:
    path = folder / "run.json"
    path.write_text(parse_args(words.split()).config.to_json())
    return ["--config-json", str(path)]


@pytest.mark.parametrize(("stored", "flags", "alone"), CASES)
def test_a_flag_replaces_every_stored_alternative(
    stored: str, flags: str, alone: str, tmp_path: Path
) -> None:
    try:
        read = parse_args([*dumped(stored, tmp_path), *shlex.split(flags)])
    except SystemExit:
        pytest.fail("the file's value is still there")
    assert (
        read.config
        == parse_args((alone if "--num-layers" in alone.split() else BASE + alone).split()).config
    )


def notices(stored: str, flags: str, folder: Path) -> list[str]:
    found: ParsedArguments = parse_args([*dumped(stored, folder), *flags.split()])
    return [notice.replace(str(folder), "") for notice in found.notices if "replaces" in notice]


def test_what_is_replaced_is_said_once_and_only_where_something_is(tmp_path: Path) -> None:
    assert notices(BASE + FULL, "--recompute-policy *:mlp", tmp_path) == [
        "--recompute-policy replaces what --config-json /run.json gives as "
        "recompute_granularity, recompute_method, "
        "recompute_num_layers"
    ]
    for flags in ("--seed 3", "--recompute-num-layers 4", "--tensor-model-parallel-size 1"):
        assert notices(BASE + FULL, flags, tmp_path) == []


def test_alternatives_on_the_command_line_itself_are_still_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (
            "--recompute-policy *:mlp --recompute-activations",
            "are two ways to say what is recomputed",
        ),
        ("--train-iters 4 --train-samples 8", "both give the length of the run"),
        ("--recompute-policy *:ful", "--recompute-policy: expected an action"),
    ):
        with pytest.raises(SystemExit):
            parse_args([*dumped(BASE + FULL, tmp_path), *flags.split()])
        assert message in capsys.readouterr().err


def test_the_tables_name_fields_that_flags_set() -> None:
    fields = {action.dest for action in build_parser().actions}
    named = {field for group in ALTERNATIVES for way in group for field in way}
    for table in (BELONGS_TO, NEEDS_MORE_THAN_ONE):
        named |= table.keys() | {field for names in table.values() for field in names}
    named |= {
        field
        for values in BELONGS_TO_VALUE.values()
        for names in values.values()
        for field in names
    }
    assert named | BELONGS_TO_VALUE.keys() <= fields
