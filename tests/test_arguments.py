"""What a command line is told: faults in one line with exit status 2, notices for what does less
than it says."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from arguments import ParsedArguments, build_parser, parse_args, supported_flags, topics
from megatron_lite.cli.help import EXAMPLE, MOST_USED, TOPICS
from megatron_lite.config.megatron_flags import NO_EFFECT, ONLY_VALUE, REFUSED
from megatron_lite.config.notices import placement_notices, setting_notices
from megatron_lite.config.run import RunConfig
from megatron_lite.training.start_text import arguments_table
from tests.support.pairs import sampled

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 "
    "--vocab-size 99 --train-iters 10"
)

# Command lines with one fault, and words of its message: the rule, or the fix.
FAULTS = [
    ("--hidden-size 18", "4: change one of them, or set"),
    ("--tensor-model-parallel-size 3", "not divisible by --tensor-model-parallel-size 3"),
    ("--num-layers 0", "--num-layers must be at least 1 (got 0)"),
    ("--lr nan", "--lr must be at least 0.0 (got nan)"),
    ("--lr inf", "--lr must be at least 0.0 and finite (got inf)"),
    ("--hidden-dropout 1.0", "--hidden-dropout must be in [0.0, 1.0) (got 1.0)"),
    ("--swiglu --squared-relu", "--swiglu and --squared-relu are two activations: choose one"),
    ("--seq-length 9", "--seq-length 9 is above --max-position-embeddings 8"),
    ("--train-samples 5 --global-batch-size 4", "both give the length of the run: set one"),
    ("--global-batch-size 5", "5 is not divisible by --micro-batch-size 2"),
    ("--save-keep-last 5", "--save-keep-last 5 needs --save DIR"),
    ("--data-path a --mock-data", "--data-path and --mock-data are two sources of data: set one"),
    ("--position-embedding-type yarn", "of learned_absolute, rope, none (got 'yarn')"),
    ("--tokenizer-type BertWordPieceCase", "HuggingFaceTokenizer, GPT2BPETokenizer"),
    ("--optimizer sgd", "--optimizer must be one of adam, muon (got 'sgd')"),
    ("--muon-nesterov", "--muon-nesterov needs --optimizer muon (got adam)"),
    (
        "--optimizer muon --muon-scalar-optimizer lion",
        "AdamW, or Muon with AdamW for what is no matrix",
    ),
    ("--optimizer muon --muon-use-syrk", "supported here: the optimizer is AdamW, or Muon"),
    ("--attention-backend cudnn", "be one of auto, flash, unfused (got 'cudnn')"),
    (
        "--use-torch-fsdp2 --use-distributed-optimizer",
        "--use-torch-fsdp2 shares out the optimizer states too: leave",
    ),
    (
        "--overlap-param-gather --overlap-grad-reduce",
        "--overlap-param-gather needs --use-distributed-optimizer",
    ),
    ("--overlap-param-gather --use-torch-fsdp2", "a step (--use-torch-fsdp2 gathers each layer"),
    (
        "--overlap-param-gather --use-distributed-optimizer",
        "--overlap-param-gather needs --overlap-grad-reduce",
    ),
    (
        "--overlap-param-gather --overlap-grad-reduce "
        "--use-distributed-optimizer --torch-compile --activation-memory-budget 0.5",
        "cannot go with --activation-memory-budget",
    ),
    ("--torch-fsdp2-no-reshard-after-forward", "needs --use-torch-fsdp2"),
    (
        "--fsdp-memory-efficient-wrapping",
        "--fsdp-memory-efficient-wrapping needs --use-torch-fsdp2",
    ),
    ("--ddp-bucket-size 0", "--ddp-bucket-size must be at least 1 (got 0)"),
    ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 needs --bf16"),
    ("--num-layers two", "argument --num-layers: invalid int value: 'two'"),
    ("--num-layers 1.5", "argument --num-layers: invalid int value: '1.5'"),
    ("--num-layers", "argument --num-layers: expected one argument"),
    ("--bf16 true", "'true' follows no flag that takes it"),
    ("--bf16=true", "ignored explicit argument 'true'"),
    (
        "--use-rotary-position-embeddings --position-embedding-type none",
        "--use-rotary-position-embeddings contradicts",
    ),
    (
        "--no-position-embedding --position-embedding-type learned_absolute",
        "--no-position-embedding contradicts",
    ),
    (
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        "--grad-reduce-in-bf16: leave one of them out",
    ),
    (
        "--use-torch-fsdp2 --fsdp-reshard-after-forward --torch-fsdp2-no-reshard-after-forward",
        "--torch-fsdp2-no-reshard-after-forward",
    ),
    ("--num-experts 8", "layers are not built; train a dense"),
    ("--multi-latent-attention", "is not built; use --group-query-attention"),
    ("--fp8-format hybrid", "8-bit and 4-bit arithmetic is not built; use --bf16"),
    ("--fp16 --bf16", "--fp16 and --bf16 are two precisions: set one"),
    ("--fp16 --fp16-lm-cross-entropy", "or --bf16 or --fp16 with float32 losses"),
    ("--hybrid-layer-pattern M*M", "state-space and hybrid layers are not built"),
    ("--perform-rl-step", "does not do reinforcement learning"),
    ("--use-custom-fsdp", "data-parallel ranks share out optimizer states with"),
    (
        "--bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        "contradicts --grad-reduce-in-bf16",
    ),
    ("--recompute-granularity full", "needs --recompute-method (uniform or block)"),
    ("--recompute-granularity half", "must be one of full, selective (got 'half')"),
    (
        "--recompute-granularity full --recompute-method best",
        "must be one of uniform, block (got 'best')",
    ),
    (
        "--recompute-activations --recompute-granularity full",
        "means --recompute-granularity selective",
    ),
    (
        "--distribute-saved-activations",
        "--distribute-saved-activations needs --recompute-granularity",
    ),
    ("--contiguous-saved-activations", "the inputs of layers that are recomputed whole"),
    (
        "--recompute-activations --recompute-method block",
        "block belongs to --recompute-granularity full",
    ),
    (
        "--recompute-activations --recompute-num-layers 2",
        "2 belongs to --recompute-granularity full",
    ),
    (
        "--recompute-activations --distribute-saved-activations",
        "belongs to --recompute-granularity full (got selective)",
    ),
    (
        "--recompute-activations --recompute-modules mlp norm",
        "mlp, activation, dropout, pointwise (got norm)",
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
        "--recompute-num-layers must be at least 1 (got 0)",
    ),
    (
        "--recompute-granularity full --recompute-method uniform --distribute-saved-activations",
        "needs --tensor-model-parallel-size > 1 (got 1)",
    ),
    (
        "--recompute-granularity full --recompute-method uniform "
        "--distribute-saved-activations --sequence-parallel --tensor-model-parallel-size 2",
        "each rank's input is already 1/t",
    ),
    ("--dataloader-inter-document-masking", "--reset-position-ids and"),
    (
        "--context-parallel-size 2 --attention-dropout 0 --reset-attention-mask "
        "--attention-backend flash",
        "no flash attention with --reset-attention-mask",
    ),
    ("--yaml-cfg run.yaml", "read a run from a file with --config-json FILE"),
    ("--expert-model-parallel-size 2", "2 is not supported here, only 1: mixture-of"),
    ("--context-parallel-size 2 --attention-backend flash", "unfused, which builds the scores"),
    (
        "--context-parallel-size 3 --attention-dropout 0",
        "= 6: each rank holds two chunks of the sequence",
    ),
    (
        "--context-parallel-size 2 --attention-dropout 0 "
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "which --sequence-parallel splits again",
    ),
    ("--cp-comm-type allgather", "needs --context-parallel-size > 1 (got 1)"),
    (
        "--context-parallel-size 2 --cp-comm-type ring",
        "--cp-comm-type must be one of p2p, allgather (got 'ring')",
    ),
    (
        "--context-parallel-size 2 --cp-comm-type p2p allgather",
        "keys and values in one way here, give one",
    ),
    (
        "--context-parallel-size 2 --attention-dropout 0 --torch-compile "
        "--activation-memory-budget 0.5",
        "would end a graph of a compiled layer",
    ),
    ("--hybrid-context-parallel", "one length, and one group of ranks shares each"),
    ("--num-layer 4", "unknown flag --num-layer: did you mean --num-layers?"),
    ("--num_layer 4", "unknown flag --num_layer: did you mean --num-layers?"),
    ("--tensor-parallel-size 2", "did you mean --tensor-model-parallel-size?"),
    ("--xyz 1", "unknown flag --xyz: --help lists the flags"),
    ("--moe-router-top-k 2", "did you mean --moe-router-topk?"),
    ("--use-mpi", "unknown flag --use-mpi: --help lists the flags"),
    ("--encoder-first-pipeline-num-layers 2", "--help lists the flags"),
    ("--seq-len 16", "unknown flag --seq-len: did you mean --seq-length?"),
    ("--lr-warmup 2", "unknown flag --lr-warmup: did you mean --lr-warmup-iters?"),
    ("--learning_rate 2", "unknown flag --learning_rate: did you mean --lr?"),
    ("--config-json /nowhere/run.json", "cannot be read (No such file or directory)"),
]


def fault_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_args(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("pretrain_gpt.py: error: ") and err.endswith("\n")
    assert err.count("\n") == 1, f"one line: {err}"
    return err.removeprefix("pretrain_gpt.py: error: ")


def faults_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The faults of a command line that has several."""
    with pytest.raises(SystemExit) as stop:
        parse_args(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    first, *lines = err.splitlines()
    assert first == f"pretrain_gpt.py: error: {len(lines)} faults in the command line:"
    assert all(line.startswith("  - ") for line in lines), err
    return [line.removeprefix("  - ") for line in lines]


def parse(words: str) -> ParsedArguments:
    return parse_args(f"{RUN} {words}".split())


@pytest.mark.parametrize(("words", "message"), FAULTS, ids=[words for words, _ in FAULTS])
def test_a_fault_is_one_line_with_the_flag_and_the_way_out(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and the line names a flag of the command line."""
    fault = fault_of(f"{RUN} {words}".split(), capsys)
    assert message in fault and any(word.partition("=")[0] in fault for word in words.split())


def test_all_missing_flags_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-layers", "2", "--seq-length", "8", "--vocab-size", "9"]
    assert fault_of(words, capsys) == (
        "missing --hidden-size, --num-attention-heads, --max-position-embeddings, "
        "--micro-batch-size: give them as flags, or a "
        "whole run with --config-json FILE\n"
    )


def test_no_flags_at_all_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert fault_of(["--vocab-size", "9"], capsys).startswith("missing --num-layers, ")
    assert len(faults_of([], capsys)) == 2, "the vocabulary is missing too"


@pytest.mark.parametrize(
    "words",
    [
        "--num-layers 0",
        "--tensor-model-parallel-size 3",
        "--context-parallel-size 2 --attention-backend flash",
        "--grad-reduce-in-bf16",
    ],
)
def test_a_missing_vocabulary_hides_no_rule(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also not one between topics, which needs the tokenizer of a run."""
    fault = fault_of([*RUN.split(), *words.split()], capsys).strip()
    run = RUN.replace("--vocab-size 99 ", "").split()
    told = faults_of([*run, *words.split()], capsys)
    assert fault in told and len(told) == 2 and "--vocab-size" in "".join(told)


@pytest.mark.parametrize("flag", sampled(list(REFUSED), every=3))
def test_a_refused_flag_says_why(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    fault = fault_of([*RUN.split(), flag, "7"], capsys)
    assert fault.startswith(f"Megatron's {flag} ") and REFUSED[flag] in fault


def words_of(flag: str) -> str:
    return flag if build_parser()._option_string_actions[flag].nargs == 0 else f"{flag} 1"


RETIRED = ("--no-onednn-matmuls", "--no-shared-memory-collectives")


@pytest.mark.parametrize("flag", [*RETIRED, *sampled(list(NO_EFFECT), every=8)])
def test_a_flag_without_effect_gives_one_notice_and_the_same_run(flag: str) -> None:
    parsed = parse(words_of(flag))
    assert parsed.config == parse("").config
    assert parsed.notices == (f"{flag} has no effect {NO_EFFECT[flag]}",)


def test_all_flags_without_effect_together_are_one_notice() -> None:
    parsed = parse(" ".join(map(words_of, NO_EFFECT)))
    assert parsed.config == parse("").config
    (notice,) = parsed.notices
    assert notice.startswith(f"{len(NO_EFFECT)} flags have no effect here")
    assert all(flag in notice for flag in NO_EFFECT)


@pytest.mark.parametrize(("flag", "only"), ONLY_VALUE.items())
def test_the_one_value_that_happens_anyway_is_accepted_without_a_notice(
    flag: str, only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(f"{flag} {only}") == parse("")
    if only in "01":
        assert parse(f"{flag} {only}.0") == parse("")
    assert f"not supported here, only {only}: " in fault_of([*RUN.split(), flag, "7"], capsys)


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (
            "--save-interval 5",
            "--save-interval has no effect without --save DIR: no checkpoint is written",
        ),
        (
            "--save-retain-interval 5",
            "--save-retain-interval has no effect without --save DIR: no checkpoint is written",
        ),
        ("--async-save", "--async-save has no effect without --save DIR: no checkpoint is written"),
        *[
            (flag, f"{flag} has no effect without --load DIR: no checkpoint is read")
            for flag in ("--finetune", "--no-load-optim", "--no-load-rng")
        ],
        *[
            (
                f"{precision} {flag} 8",
                f"{flag} has no effect without --fp16: the loss of a float32 or --bf16 run is not "
                "scaled",
            )
            for precision in ("", "--bf16")
            for flag in ("--loss-scale", "--initial-loss-scale", "--hysteresis")
        ],
        (
            "--fp16 --loss-scale 8 --hysteresis 1",
            "--hysteresis has no effect with --loss-scale 8.0, a constant",
        ),
        ("--fp16 --loss-scale 0", "--loss-scale 0 is read as a dynamic scale"),
        ("--eval-iters -1", "--eval-iters -1 is read as 0: nothing is evaluated"),
        *[
            (
                f"{flag} {value}",
                f"{flag} has no effect without --recompute-granularity: nothing is recomputed",
            )
            for flag, value in (
                ("--recompute-method", "uniform"),
                ("--recompute-num-layers", "2"),
                ("--recompute-modules", "mlp"),
            )
        ],
        (
            "--recompute-granularity full --recompute-method block --recompute-modules mlp",
            "--recompute-modules has no effect with --recompute-granularity full, which rebuilds "
            "whole layers",
        ),
    ],
)
def test_a_setting_that_megatron_does_not_read_gives_a_notice(words: str, notice: str) -> None:
    assert parse(words).notices == (notice,)


def test_a_recompute_setting_that_nothing_reads_leaves_the_run_as_it_is() -> None:
    assert parse("--recompute-method uniform --recompute-num-layers 2").config == parse("").config
    full = "--recompute-granularity full --recompute-method uniform"
    assert parse(f"{full} --recompute-modules mlp").config == parse(full).config


@pytest.mark.parametrize(
    ("words", "today"),
    [
        ("--global_batch_size 4", "--global-batch-size 4"),
        ("--global_batch_size=4", "--global-batch-size=4"),
        ("--batch_size 4", "--micro-batch-size 4"),
    ],
)
def test_underscores_in_a_flag_are_read_as_dashes(words: str, today: str) -> None:
    assert parse(words).config == parse(today).config != parse("").config


def test_all_faults_of_a_command_line_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--num-layers two --seed one --hidden-siz 4 --num-experts 8 --moe-use-upcycling "
        "--fp8-format hybrid --window-size x --mtp-num-layers 1 --lr -1 --xyz 3"
    )
    assert faults_of([*RUN.split(), *words.split()], capsys) == [
        "argument --num-layers: invalid int value: 'two'",
        "argument --seed: invalid int value: 'one'",
        "--window-size 'x': give two numbers, the tokens before and after a query that it reads, "
        "such as 128,0",
        "unknown flag --hidden-siz: did you mean --hidden-size?",
        "unknown flag --xyz: --help lists the flags",
        "Megatron's --num-experts and --moe-use-upcycling are not supported here: "
        + REFUSED["--num-experts"],
        f"Megatron's --fp8-format is not supported here: {REFUSED['--fp8-format']}",
        "Megatron's --mtp-num-layers 1 is not supported here, only 0: "
        + REFUSED["--mtp-num-layers"],
        "--lr must be at least 0.0 (got -1.0)",
    ]


UNKNOWN = "--use-mpi --sequence-paralell --hidden-sizes 32 --recompute-granularitys full"
HIDDEN = (
    ("--hidden-dropout 2 --attention-dropout 3", 2),
    ("--micro-batch-size 3 --global-batch-size 4 --bf16 --fp16", 2),
    ("--lr -1 --train-iters 3 --train-samples 4 --min-lr -2", 3),
    # between topics: the virtual stages, the tokenizer's ids, and chunks in a pipeline
    ("--seq-length 32 --hidden-dropout 2", 2),
    ("--lr-warmup-iters 3 --lr-warmup-samples 4 --eval-iters 1 --exit-interval 0", 2),
)


@pytest.mark.parametrize(("words", "least"), HIDDEN)
def test_no_fault_hides_another(words: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    """All come in one message: without the unknown flags there is nothing new."""
    alone = faults_of([*RUN.split(), *words.split()], capsys)
    with_unknown = faults_of([*RUN.split(), *UNKNOWN.split(), *words.split()], capsys)
    assert len(alone) >= least
    assert set(alone) <= set(with_unknown)


def test_rules_of_several_topics_are_checked_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hidden-dropout 2 --pipeline-model-parallel-size 0 --micro-batch-size 0 --lr nan"
    assert len(faults_of([*RUN.split(), *words.split()], capsys)) == 4


def test_a_fault_brings_no_other_fault_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num-layers two --sequence-parallel --tensor-model-parallel-size x"
    assert len(faults_of([*RUN.split(), *words.split()], capsys)) == 2


@pytest.mark.parametrize("topic", ["refused", "ignored"])
def test_help_lists_all_flags_that_set_no_field(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help", topic])
    words = capsys.readouterr().out.split()
    assert stop.value.code == 0
    assert {"refused": {*REFUSED}, "ignored": {*NO_EFFECT}}[topic] <= set(words)


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("--batch-size 3", "--micro-batch-size 3"),
        ("--batch-size=3", "--micro-batch-size 3"),
        ("--warmup 0.1", "--lr-warmup-fraction 0.1"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--no-position-embedding", "--position-embedding-type none"),
        (
            "--no-position-embedding --position-embedding-type rope",
            "--position-embedding-type rope",
        ),
        ("--attention-backend fused", "--attention-backend auto"),
        ("--attention-backend local", "--attention-backend unfused"),
        (
            "--use-torch-fsdp2 --no-fsdp-reshard-after-forward",
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        ),
    ],
)
def test_another_way_to_say_it_gives_the_same_run(old: str, today: str) -> None:
    assert parse(old).config == parse(today).config
    assert parse(today).config != parse("").config or today.endswith(" auto")


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        ("--batch-size 3", "--batch-size is an old spelling, read as --micro-batch-size"),
        ("--attention-backend fused", "--attention-backend fused is read as auto"),
        ("--attention-backend local", "--attention-backend local is read as unfused"),
        (
            "--no-position-embedding",
            "--no-position-embedding is an old flag, read as --position-embedding-type none",
        ),
        (
            "--sequence-parallel",
            "--sequence-parallel is turned off: it needs --tensor-model-parallel-size > 1",
        ),
        (
            "--no-overlap-p2p-communication",
            "--no-overlap-p2p-communication has no effect: --pipeline-model-parallel-size is 1",
        ),
        (
            "--optimizer muon --muon-tp-mode blockwise",
            "--muon-tp-mode blockwise has no effect: --tensor-model-parallel-size is 1",
        ),
        (
            "--context-parallel-size 2 --attention-backend unfused",
            "--cp-comm-type p2p has no effect on unfused attention, which gathers keys and values",
        ),
        (
            "--context-parallel-size 2 --attention-dropout 0 --loss-chunk-size 8",
            (
                "--loss-chunk-size 8 takes all 8 tokens of a micro-batch at once: their logits are "
                "not kept, but exist"
            ),
        ),
    ],
)
def test_what_is_read_otherwise_than_written_gives_a_notice(words: str, notice: str) -> None:
    assert parse(words).notices == (notice,)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16 --squared-relu",
        "--sequence-parallel --tensor-model-parallel-size 2",
        "--use-rotary-position-embeddings",
        "--attention-backend flash",
        "--context-parallel-size 2 --attention-dropout 0",
        "--context-parallel-size 2 --attention-backend unfused --cp-comm-type allgather",
        (
            "--overlap-grad-reduce --ddp-bucket-size 7 --use-distributed-optimizer "
            "--overlap-param-gather"
        ),
        "--use-torch-fsdp2 --fsdp-memory-efficient-wrapping --bf16 --grad-reduce-in-bf16",
    ],
)
def test_flags_that_do_what_they_say_give_no_notice(words: str) -> None:
    assert parse(words).notices == ()


def test_vocabulary_files_alone_mean_the_gpt2_tokenizer_as_in_megatron() -> None:
    run = RUN.replace("--vocab-size 99", "--vocab-file vocab.json --merge-file merges.txt").split()
    assert parse_args(run).config.tokenizer.tokenizer_type == "GPT2BPETokenizer"


def test_several_data_paths_keep_their_order() -> None:
    assert parse("--data-path 0.3 b 0.7 a --bf16").config.data.data_path == ("0.3", "b", "0.7", "a")


def test_the_last_of_two_equal_flags_wins() -> None:
    assert parse("--seed 5 --seed 6").config.training.seed == 6


def help_of(words: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """What a command line that ends in a help prints."""
    with pytest.raises(SystemExit) as stop:
        parse_args(words.split())
    assert stop.value.code == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def flags_in(text: str) -> set[str]:
    """The flags that a help describes: those at the start of a line."""
    lines = [line for line in text.splitlines() if line.startswith("  -")]
    return {
        word.rstrip(",")
        for line in lines
        for word in line.strip().split("  ")[0].split()
        if word.startswith("--")
    }


def test_help_alone_is_short_and_its_command_line_is_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of("--num-layers 2 --help", capsys)
    lines = text.splitlines()
    assert len(lines) <= 55 and max(map(len, lines)) <= 100
    assert flags_in(text) >= {*MOST_USED} and len(MOST_USED) == 10
    assert all(f"\n  {topic} " in text for topic in TOPICS)
    assert parse_args(shlex.split(EXAMPLE.replace("\\\n", " "))).notices == ()


def test_the_topics_of_help_share_out_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    every = flags_in(help_of("--help all", capsys))
    of_topics = [flags_in(help_of(f"--help {topic}", capsys)) for topic in TOPICS]
    assert every == {*supported_flags(build_parser())} - {"-h"}
    assert sum(map(len, of_topics)) == len(every) and {*itertools.chain(*of_topics)} == every
    assert {*TOPICS} - {"general"} == {name.replace("_", "-") for name in topics()}


@pytest.mark.parametrize(
    ("word", "same_as"),
    [
        ("data_parallel", "data-parallel"),
        ("warmup", "lr-warmup"),
        ("--persistent-save-interval", "--save-interval"),
        ("RECOMPUTE", "recompute"),
    ],
)
def test_help_on_another_spelling_is_the_same(
    word: str, same_as: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = flags_in(help_of(f"--help {word}", capsys))
    assert found and found == flags_in(help_of(f"--help {same_as}", capsys))


def test_help_on_one_flag_is_about_that_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags_in(help_of("--help --bf16", capsys)) == {"--bf16"}
    assert flags_in(help_of("--help --seed", capsys)) == {"--seed"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--num-experts", "--num-experts is refused: "),
        ("num_experts", "--num-experts is refused: "),
        ("--use-mcore-models", "--use-mcore-models is accepted and has no effect here: "),
        ("--batch-size", "--batch-size is an old spelling of --micro-batch-size"),
    ],
)
def test_help_on_a_flag_that_only_megatron_has_tells_what_happens_to_it(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(f"--help {word}", capsys)
    assert text.startswith(said) and text.count("\n") <= 2


def test_help_on_nothing_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --help recompute?" in help_of("--help recomputing", capsys, status=2)
    assert help_of("--help zzz", capsys, status=2).count("\n") == 1
    assert "such as --fp8" in help_of("--help fp8", capsys, status=2)


def test_help_lists_flags_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of("--help all", capsys).split())
    assert "--seed N" in text and "(default: 1234)" in text and "(required)" in text
    assert "--use-mcore-models" not in text, "flags without effect are not advertised"


# --dump-config and --config-json

MANY = (
    "--position-embedding-type rope --swiglu --lr 3e-4 --lr-decay-style cosine --data-path a b "
    "--split 98,2,0 --save out "
    "--save-interval 5 --bf16 --no-bias-gelu-fusion --disable-bias-linear --hidden-size 64"
)


def test_a_dumped_run_is_read_back_equal(tmp_path: Path) -> None:
    config = parse(MANY).config
    path = tmp_path / "run.json"
    path.write_text(config.to_json())
    assert parse_args(["--config-json", str(path)]).config == config


def test_flags_override_the_file_even_with_a_default_value(tmp_path: Path) -> None:
    config = parse(f"{MANY} --seed 7 --log-interval 3").config
    path = tmp_path / "run.json"
    path.write_text(config.to_json())
    read = parse_args(["--config-json", str(path), "--seed", "1234"]).config
    assert read == replace(config, training=replace(config.training, seed=1234))


def test_sizes_that_follow_from_others_follow_an_overriding_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(parse("").config.to_json())
    model = parse_args(["--config-json", str(path), "--hidden-size", "32"]).config.model
    assert (model.kv_channels, model.ffn_hidden_size) == (8, 128)


def test_sizes_that_were_set_stay_when_another_flag_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(parse("--kv-channels 6 --ffn-hidden-size 40").config.to_json())
    model = parse_args(["--config-json", str(path), "--hidden-size", "32"]).config.model
    assert (model.kv_channels, model.ffn_hidden_size) == (6, 40)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "run: expected an object, got list"),
        ("{}", "run: missing field data, model, tokenizer, training"),
    ],
)
def test_a_file_that_is_no_run_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    assert fault_of(["--config-json", str(path)], capsys).startswith(
        f"--config-json {path}: {message}"
    )


def test_an_ill_typed_field_of_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(parse("").config.to_json())
    values["model"]["num_layers"] = "2"
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    assert "run.model.num_layers: expected" in fault_of(["--config-json", str(path)], capsys)


@pytest.mark.parametrize(
    "words", ["--local_rank=3", "--local_rank 3", "--local-rank=3", "--local-rank 3"]
)
def test_a_launchers_local_rank_is_read_beside_the_run(words: str) -> None:
    parsed = parse(words)
    assert (parsed.local_rank, parsed.config, parsed.notices) == (
        3,
        parse("").config,
        (),
    ) and parse("").local_rank is None


def test_a_local_rank_that_is_no_number_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--local_rank: invalid int value: 'two'" in fault_of(
        [*RUN.split(), "--local_rank=two"], capsys
    )


def test_dump_config_is_told_apart_from_a_run() -> None:
    assert parse("--dump-config").dump_config and not parse("").dump_config
    assert parse("--dump-config").config == parse("").config


def test_dump_config_prints_json_to_stdout_and_notices_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"{RUN} --dump-config --tp-comm-overlap --save-interval 5"
    assert pretrain_gpt.main(words.split()) == 0
    out, err = capsys.readouterr()
    assert RunConfig.from_json(out) == parse("--save-interval 5").config
    assert err.splitlines() == list(parse("--tp-comm-overlap --save-interval 5").notices)
    assert len(err.splitlines()) == 2


def test_the_arguments_table_has_megatrons_form() -> None:
    lines = arguments_table(parse("").config).split("\n")
    assert lines[0] == "------------------------ arguments ------------------------"
    assert "  adam_beta1 ...................................... 0.9" in lines
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names) and {
        "num_layers",
        "lr",
        "data_path",
        "tensor_model_parallel_size",
    } <= set(names)
    assert all(
        line.split()[1].strip(".") == "" and len(line.split(" ")[2] + line.split(" ")[3]) == 48
        for line in lines[1:-1]
        if len(line.split()[0]) < 46
    )


def test_parsing_imports_no_torch() -> None:
    program = (
        f"import sys, arguments; arguments.parse_args({RUN.split()!r}); sys.exit('torch' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_core_attention_is_priced_by_the_device_that_runs_it() -> None:
    for words, on_cpu, on_cuda in (
        ("--attention-backend flash", 0, 1),
        ("", 0, 1),
        ("--attention-backend unfused", 0, 0),
        # the last is a notice of the command line already
        ("--attention-dropout 0", 0, 0),
    ):
        config = parse(f"--recompute-activations {words}").config
        found = [
            len(placement_notices(config, device=device, world_size=1))
            for device in ("cpu", "cuda")
        ]
        assert found == [on_cpu, on_cuda], words
        assert bool(setting_notices(config)) == (words == "--attention-dropout 0")


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (
            "--recompute-activations --attention-dropout 0",
            "--recompute-modules core_attn saves next to nothing",
        ),
        (
            "--recompute-activations --attention-backend flash --attention-dropout 0",
            "core_attn saves next to nothing",
        ),
        # a CPU has no flash kernel with dropout
        ("--recompute-activations --attention-backend flash", None),
        ("--recompute-activations --attention-backend unfused", None),
        ("--recompute-activations --attention-backend auto --attention-dropout 0.1", None),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "is more than the 2 layers",
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", None),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
            "--recompute-num-layers 3 is more than the 2 layers of a stage: each stage is one unit",
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", None),
        (
            "--recompute-policy 0-9:full",
            "--recompute-policy '0-9:full': 0-9 reaches only to layer 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-policy *:full --global-batch-size 2 "
            "--num-microbatches-with-partial-activation-checkpoints 1",
            None,
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-policy *:full --global-batch-size 1 "
            "--num-microbatches-with-partial-activation-checkpoints 1",
            (
                "checkpoints 1: a step has at most 1 micro-batch (--global-batch-size over "
                "--micro-batch-size), so all of them keep"
            ),
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "is an old spelling, read as --recompute-num-layers",
        ),
    ],
)
def test_recompute_settings_that_do_little_are_one_notice(words: str, warning: str | None) -> None:
    base = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
        "--max-position-embeddings 8 "
        "--micro-batch-size 1 --vocab-size 9 "
    )
    notices = parse_args((base + words).split()).notices
    assert sum("recompute" in notice and (warning or "") in notice for notice in notices) == (
        warning is not None
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" + "0" * 4000, "is beyond 64 bits"),
        ("1" + "0" * 5000, "is beyond 64 bits"),
        (str(2**63), "is beyond 64 bits"),
        ("x" * 5000, "invalid int value: 'xxx"),
    ],
)
def test_a_number_of_any_length_is_one_short_line(capsys, text, message):
    with pytest.raises(SystemExit, match="2"):
        parse_args([*RUN.split(), "--num-layers", text])
    error = capsys.readouterr().err
    assert error.startswith("pretrain_gpt.py: error: argument --num-layers: ") and message in error
    assert error.count("\n") == 1 and len(error) < 250


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"a":' * 200_000, '{"model": {"num_layers": 1%s}}' % ("0" * 5000)]
)
def test_a_config_file_beyond_all_bounds_is_one_short_line(capsys, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--config-json", str(tmp_path / "run.json")])
    error = capsys.readouterr().err
    assert error.startswith(f"pretrain_gpt.py: error: --config-json {tmp_path}/run.json: ")
    assert error.count("\n") == 1 and len(error) < 400


def test_a_config_file_without_an_end_is_not_read_to_its_end(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--config-json", "/dev/zero"])
    assert (
        "error: --config-json /dev/zero: is no regular file, and pipes, devices and folders are "
        "not read\n" in capsys.readouterr().err
    )
