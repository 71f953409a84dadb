"""Every rule of the configuration: what breaks it, what the message says, and the nearest flags
that keep it.

Amounts of memory as texts.

The default of --loss-chunk-size: chunks of 512 tokens wherever they cost nothing.
"""

import json
import shlex
from pathlib import Path

import pytest

from arguments import parse_args
from megatron_lite.config.checks import MOST_SIZE
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.notices import notices
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run_flags import run_fields, topics
from megatron_lite.config.setting import settings_of
from megatron_lite.config.training import TrainingConfig
from megatron_lite.config.units import parse_bytes
from tests.support.commands import fault_of, parsed_line
from tests.support.pairs import in_one_test
from tests.support.runs import tiny_run

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 --vocab-size 99"
)
# Flags that break one rule, words of the message, and flags next to them that keep it.
FAULTS = json.loads(Path(__file__).with_name("faults.json").read_text())


@in_one_test("broken, message, kept", FAULTS)
def test_a_broken_rule_is_one_line_with_flag_value_and_fix(broken, message, kept):
    """The exit status is 2, and the class that owns the rule says the same to a library user."""
    fault = fault_of(parse_args, f"{RUN} {broken}").removeprefix("pretrain_gpt.py: error: ")
    assert message in fault
    flags = [word.partition("=")[0] for word in shlex.split(broken) if word.startswith("--")]
    assert any(flag in fault for flag in flags) or "follows no flag" in fault
    parsed_line(f"{RUN} {kept}")


def test_the_reason_of_an_exclusion_is_not_said_of_a_need():
    fault = fault_of(parse_args, f"{RUN} --pipeline-model-parallel-layout Et|tL")
    assert fault.rstrip().endswith("needs --pipeline-model-parallel-size > 1")


def wrong_values():
    """Of each field with a rule about its value: a value that breaks it, and the rule."""
    for name, one in run_fields().items():
        bounds = {}
        if one.choices:
            bounds["NONE"] = f"must be one of {', '.join(map(str, one.choices))}"
        if one.least is not None:
            bounds[one.least - 1] = f"at least {one.least}"
        if one.above is not None:
            bounds[one.above] = f"above {one.above}"
        if one.below is not None:
            bounds[one.below] = f"below {one.below}"
        if one.most is not None:
            bounds[one.most + 1] = f"at most {one.most}"
        if one.kind is float:
            bounds |= {float("nan"): "", float("inf"): "finite"}
        if one.kind is int and one.below is None and not one.choices:
            bounds[2**62] = f"at most {one.most or MOST_SIZE}"
        for value, rule in bounds.items():
            yield name, one.flag, value, rule


@in_one_test("name, flag, value, rule", wrong_values())
def test_a_value_beyond_its_rule_is_told_with_flag_rule_and_value(name, flag, value, rule):
    one = run_fields()[name]
    several = one.nargs not in (None, "?") or isinstance(one.default, tuple)
    kind = topics()[one.topic]
    required = {each.field: 1 for each in settings_of(kind).values() if each.is_required}
    with pytest.raises(ValueError) as fault:
        kind(**{**required, name: (value,) if several else value})
    said = str(fault.value)
    assert said.startswith(f"{flag} must be ") and rule in said and f"(got {value!r})" in said


# What follows from the fields


@pytest.mark.parametrize(
    "changes, ffn",
    [
        ({}, 128),
        ({"swiglu": True, "hidden_size": 100, "num_attention_heads": 5}, 256),
        ({"swiglu": True, "hidden_size": 4096}, 10880),
        ({"swiglu": True, "hidden_size": 24}, 64),
        ({"swiglu": True, "ffn_hidden_size": 7}, 7),
        ({"squared_relu": True}, 128),
    ],
)
def test_the_default_ffn_size_is_megatrons(changes, ffn):
    assert tiny_run(**changes).model.ffn_size == ffn


def test_sequence_parallel_is_off_on_one_rank():
    assert not ParallelConfig(sequence_parallel=True).sequence_parallel
    assert ParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2).sequence_parallel


def test_microbatches_and_iterations_follow_from_the_batch():
    training = TrainingConfig(micro_batch_size=2, global_batch_size=12, train_samples=50)
    assert (training.batch_size(3), training.num_microbatches(3)) == (12, 2)
    assert training.num_iterations(training.batch_schedule(3)) == 4
    with pytest.raises(
        ValueError, match="12 is not divisible by --micro-batch-size 2 x data-parallel size 4 = 8"
    ):
        training.num_microbatches(4)


@pytest.mark.parametrize(
    "values, tp_size, padded",
    [
        ({"vocab_size": 127}, 1, 128),  # NullTokenizer adds the end-of-document id
        ({"vocab_size": 128}, 1, 256),
        ({"vocab_size": 128}, 4, 512),
        ({"vocab_size": 50257, "vocab_file": "v", "merge_file": "m"}, 1, 50304),
        ({"vocab_size": 50257, "vocab_file": "v", "merge_file": "m"}, 8, 51200),
        ({"vocab_size": 9, "make_vocab_size_divisible_by": 5}, 3, 15),
    ],
)
def test_the_vocabulary_is_padded_as_in_megatron(values, tp_size, padded):
    assert TokenizerConfig(**values).rows(tp_size) == padded


def test_an_unknown_vocabulary_is_a_fault_where_it_is_needed():
    with pytest.raises(
        ValueError, match="--tokenizer-type HuggingFaceTokenizer is not known yet: set --vocab-size"
    ):
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="m").rows(1)


def test_a_number_with_a_unit_is_so_many_bytes():
    for text, expected in {
        "80GiB": 80 * 2**30,
        "80 gib": 80 * 2**30,
        "1.5GB": 1_500_000_000,
        "1B": 1,
        "1073741824": 2**30,
        "2TiB": 2**41,
    }.items():
        assert parse_bytes("--memory-budget", text, least=1) == expected


@pytest.mark.parametrize(
    "text", ["GiB", "-1GiB", "1e3GiB", "80G", "1GiB2", "", "1 2", "\u0663GiB", "1" * 16, "0GiB"]
)
def test_anything_else_is_refused_with_the_flag_and_the_text(text):
    with pytest.raises(ValueError, match=f"--memory-budget '{text}'"):
        parse_bytes("--memory-budget", text, least=1)


BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 1024 "
    "--vocab-size 127 --mock-data --train-iters 1 --lr 1e-3 --hidden-dropout 0 "
    "--attention-dropout 0"
)
# With each of these backward has to compute the logits of a chunk again.
TWO_PASSES = (
    "--bf16",
    "--fp16",
    "--use-torch-fsdp2",
    "--no-gradient-accumulation-fusion",
    "--torch-compile --activation-memory-budget 0.5",
)


def config_of(flags):
    return parsed_line(f"{BASE} {flags}").config


@pytest.mark.parametrize(
    "flags, chunk_size",
    [
        ("--seq-length 512 --micro-batch-size 1", None),
        ("--seq-length 513 --micro-batch-size 1", 512),
        ("--seq-length 256 --micro-batch-size 2", None),
        ("--seq-length 256 --micro-batch-size 3", 512),
        ("--seq-length 1024 --micro-batch-size 1 --context-parallel-size 2", None),
        ("--seq-length 1024 --micro-batch-size 2 --context-parallel-size 2", 512),
        ("--seq-length 1024 --micro-batch-size 1 --tensor-model-parallel-size 2", 512),
        ("--seq-length 1024 --micro-batch-size 1 --use-distributed-optimizer", 512),
    ],
)
def test_a_float32_run_with_more_than_512_tokens_has_chunks(flags, chunk_size):
    config = config_of(flags)
    assert config.loss_chunk_size == chunk_size
    assert config.loss_in_one_pass == (chunk_size is not None)
    assert config.training.loss_chunk_size is None  # so a changed run has a default of its own
    world_size = config.parallel.model_ranks
    assert len(notices(config, "log", world_size=world_size)) == (chunk_size is not None)


@pytest.mark.parametrize("flags", [*TWO_PASSES, "--loss-chunk-size 0"])
def test_a_run_whose_chunks_would_cost_something_has_whole_logits(flags):
    config = config_of(f"--seq-length 1024 --micro-batch-size 1 {flags}")
    assert config.loss_chunk_size is None
    assert not config.loss_in_one_pass


def test_a_given_size_is_taken():
    config = config_of("--seq-length 1024 --micro-batch-size 1 --bf16 --loss-chunk-size 100")
    assert config.loss_chunk_size == 100
    assert not notices(config, "log", world_size=1)
    assert not config.loss_in_one_pass
