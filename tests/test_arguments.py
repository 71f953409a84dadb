"""What a command line is told: faults in one line with exit status 2, notices for what does less
than it says."""

import itertools
from dataclasses import replace

import pytest

import pretrain_gpt
from arguments import build_parser, parse_args, supported_flags, topics
from megatron_lite.cli.help import EXAMPLE, MOST_USED, TOPICS
from megatron_lite.config.megatron_flags import NO_EFFECT, ONLY_VALUE, REFUSED, WHOSE
from megatron_lite.config.run import RunConfig
from tests.support.commands import ended, fault_of, parsed_line
from tests.support.pairs import in_one_test, sampled

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 "
    "--vocab-size 99 --train-iters 10"
)


def fault(words):
    """The one line that a command line is refused with, without the program's name."""
    return fault_of(parse_args, words).removeprefix("pretrain_gpt.py: error: ")


def faults_of(words):
    """The faults of a command line that has several."""
    found = ended(parse_args, words)
    assert (found.status, found.out) == (2, "")
    first, *lines = found.err.splitlines()
    assert first == f"pretrain_gpt.py: error: {len(lines)} faults in the command line:"
    assert all(line.startswith("  - ") for line in lines), lines
    return [line.removeprefix("  - ") for line in lines]


def parse(words):
    return parsed_line(f"{RUN} {words}")


def test_all_missing_flags_are_named_at_once():
    assert fault("--num-layers 2 --seq-length 8 --vocab-size 9") == (
        "missing --hidden-size, --num-attention-heads, --max-position-embeddings, "
        "--micro-batch-size: give them as flags, or a "
        "whole run with --config-json FILE\n"
    )


@in_one_test("flag", sampled(list(REFUSED), every=3))
def test_a_refused_flag_says_why(flag):
    found = fault(f"{RUN} {flag} 7")
    assert found.startswith(f"{WHOSE.get(flag, 'Megatron')}'s {flag} ") and REFUSED[flag] in found


def words_of(flag):
    return flag if build_parser()._option_string_actions[flag].nargs == 0 else f"{flag} 1"


RETIRED = ("--no-onednn-matmuls", "--no-shared-memory-collectives")


@in_one_test("flag", [*RETIRED, *sampled(list(NO_EFFECT), every=8)])
def test_a_flag_without_effect_gives_one_notice_and_the_same_run(flag):
    parsed = parse(words_of(flag))
    assert parsed.config == parse("").config
    assert parsed.notices == (f"{flag} has no effect {NO_EFFECT[flag]}",)


@in_one_test("flag, only", ONLY_VALUE.items())
def test_the_one_value_that_happens_anyway_is_accepted_without_a_notice(flag, only):
    assert parse(f"{flag} {only}") == parse("")
    if only in "01":
        assert parse(f"{flag} {only}.0") == parse("")
    assert f"not supported here, only {only}: " in fault(f"{RUN} {flag} 7")


def test_a_recompute_setting_that_nothing_reads_leaves_the_run_as_it_is():
    assert parse("--recompute-method uniform --recompute-num-layers 2").config == parse("").config
    full = "--recompute-granularity full --recompute-method uniform"
    assert parse(f"{full} --recompute-modules mlp").config == parse(full).config


def test_all_faults_of_a_command_line_are_listed():
    words = (
        "--num-layers two --seed one --hidden-siz 4 --moe-latent-size 8 --moe-use-upcycling "
        "--fp8-format hybrid --window-size x --mtp-num-layers 1 --lr -1 --xyz 3"
    )
    assert faults_of(f"{RUN} {words}") == [
        "argument --num-layers: two is no whole number of at most 64 bits",
        "argument --seed: one is no whole number of at most 64 bits",
        "--window-size 'x': give two numbers, the tokens before and after a query that it reads, "
        "such as 128,0",
        "unknown flag --hidden-siz: did you mean --hidden-size?",
        "unknown flag --xyz: --help lists the flags",
        "Megatron's --moe-latent-size, --moe-use-upcycling are not supported here: "
        + REFUSED["--moe-latent-size"],
        f"Megatron's --fp8-format is not supported here: {REFUSED['--fp8-format']}",
        "Megatron's --mtp-num-layers 1 is not supported here, only 0: "
        + REFUSED["--mtp-num-layers"],
        "--lr must be at least 0.0 (got -1.0)",
    ]


UNKNOWN = "--use-mup2 --sequence-paralell --hidden-sizes 32 --recompute-granularitys full"
HIDDEN = (
    ("--hidden-dropout 2 --attention-dropout 3", 2),
    ("--micro-batch-size 3 --global-batch-size 4 --bf16 --fp16", 2),
    ("--lr -1 --train-iters 3 --train-samples 4 --min-lr -2", 3),
    # between topics: the virtual stages, the tokenizer's ids, and chunks in a pipeline
    ("--seq-length 32 --hidden-dropout 2", 2),
    ("--lr-warmup-iters 3 --lr-warmup-samples 4 --eval-iters 1 --exit-interval 0", 2),
)


@pytest.mark.parametrize("words, least", HIDDEN)
def test_no_fault_hides_another(words, least):
    """All come in one message: without the unknown flags there is nothing new."""
    alone, with_unknown = faults_of(f"{RUN} {words}"), faults_of(f"{RUN} {UNKNOWN} {words}")
    assert len(alone) >= least
    assert set(alone) <= set(with_unknown)


@pytest.mark.parametrize(
    "words, starts",
    [
        (
            "--hidden-sizes 3 --num-layers 2 --num-attention-heads a --mock-data --lr -1",
            [
                "argument --num-attention-heads: a is",
                "unknown flag --hidden-sizes",
                "missing --max-position-embeddings, --micro-batch-size, --seq-length:",
                "--tokenizer-type NullTokenizer needs --vocab-size",
                "--lr must be",
            ],
        ),
        (
            f"--muon-nesterov --muon-momentum 0.95 --optimizr muon --seed -1 {RUN}",
            ["unk", "--seed"],
        ),
        (f"--muon-nesterov --muon-momentum 0.95 {RUN}", ["--muon-momentum", "--muon-nesterov"]),
        (f"{RUN} word --lr -1", ["'word' follows no flag", "--lr must be"]),
        ("--config-json /no --lr -1 --recompute-num-layers 2", ["--config-json /no", "--lr must"]),
        ("--hf-config /no --lr -1 --seed -1", ["/no: cannot", "--seed must be", "--lr must be"]),
    ],
)
def test_a_fault_that_may_follow_from_another_is_not_told(words, starts):
    found = faults_of(words)
    assert [one[: len(start)] for one, start in zip(found, starts, strict=True)] == starts


@pytest.mark.parametrize("topic, flags", [("refused", REFUSED), ("ignored", NO_EFFECT)])
def test_help_lists_all_flags_that_set_no_field(topic, flags):
    assert {*flags} <= {*help_of(topic).split()}


@pytest.mark.parametrize(
    "old, today",
    [
        ("--global_batch_size 4", "--global-batch-size 4"),
        ("--warmup 0.1", "--lr-warmup-fraction 0.1"),
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--no-position-embedding", "--position-embedding-type none"),
        (
            "--no-position-embedding --position-embedding-type rope",
            "--position-embedding-type rope",
        ),
        ("--attention-backend local", "--attention-backend unfused"),
        (
            "--use-torch-fsdp2 --no-fsdp-reshard-after-forward",
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        ),
    ],
)
def test_another_way_to_say_it_gives_the_same_run(old, today):
    assert parse(old).config == parse(today).config
    assert parse(today).config != parse("").config


def test_vocabulary_files_alone_mean_the_gpt2_tokenizer_as_in_megatron():
    run = RUN.replace("--vocab-size 99", "--vocab-file vocab.json --merge-file merges.txt")
    assert parsed_line(run).config.tokenizer.tokenizer_type == "GPT2BPETokenizer"


def help_of(words):
    """What --help prints."""
    found = ended(parse_args, f"--help {words}")
    assert (found.status, found.err) == (0, "")
    return found.out


def flags_in(text):
    """The flags that a help describes: those at the start of a line."""
    lines = [line.strip().split("  ")[0] for line in text.splitlines() if line.startswith("  -")]
    words = [word.rstrip(",") for line in lines for word in line.split()]
    return {word for word in words if word.startswith("--")}


def test_help_alone_is_short_and_its_command_line_is_a_run():
    text = ended(parse_args, "--num-layers 2 --help").out
    assert text.count("\n") <= 55
    assert flags_in(text) >= {*MOST_USED} and len(MOST_USED) == 10
    assert all(f"\n  {topic} " in text for topic in TOPICS)
    assert parsed_line(EXAMPLE.replace("\\\n", " ")).notices == ()


def test_the_topics_of_help_share_out_all_flags():
    every = flags_in(help_of("all"))
    of_topics = [flags_in(help_of(topic)) for topic in TOPICS]
    assert every == {*supported_flags(build_parser())} - {"-h"}
    assert sum(map(len, of_topics)) == len(every) and {*itertools.chain(*of_topics)} == every
    assert {*TOPICS} - {"general"} == {name.replace("_", "-") for name in topics()}


@pytest.mark.parametrize(
    "word, said",
    [
        ("--moe-latent-size", "--moe-latent-size is refused: "),
        ("--use-mcore-models", "--use-mcore-models is accepted and has no effect here: "),
        ("--batch-size", "--batch-size is an old spelling of --micro-batch-size"),
    ],
)
def test_help_on_a_flag_that_only_megatron_has_tells_what_happens_to_it(word, said):
    assert help_of(word).startswith(said)
    assert "did you mean --help recompute?" in fault("--help recomputing")


# --dump-config and --config-json

MANY = (
    "--position-embedding-type rope --swiglu --lr 3e-4 --lr-decay-style cosine --data-path a b "
    "--split 98,2,0 --save out --kv-channels 16 "
    "--save-interval 5 --bf16 --no-bias-gelu-fusion --disable-bias-linear --hidden-size 62"
)


def test_a_dumped_run_is_read_back_equal_and_flags_override_it(tmp_path):
    config = parse(f"{MANY} --seed 7").config
    path = tmp_path / "run.json"
    path.write_text(config.to_json())
    assert parsed_line(f"--config-json {path}").config == config
    # a flag overrides the file, also with its default
    read = parsed_line(f"--config-json {path} --seed 1234").config
    assert read == replace(config, training=replace(config.training, seed=1234))


def test_sizes_that_follow_from_others_follow_an_overriding_flag(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(parse("").config.to_json())
    model = parsed_line(f"--config-json {path} --hidden-size 32").config.model
    assert (model.kv_channels, model.ffn_hidden_size) == (8, 128)


def test_dump_config_prints_json_to_stdout_and_notices_to_stderr():
    found = ended(pretrain_gpt.main, f"{RUN} --dump-config --tp-comm-overlap --save-interval 5")
    assert found.status == 0
    assert RunConfig.from_json(found.out) == parse("--save-interval 5").config
    lines = found.err.splitlines()
    assert lines == list(parse("--tp-comm-overlap --save-interval 5").notices) and len(lines) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("1" + "0" * 5000, "is no whole number"),
        (str(2**63), "is no whole number"),
        ("x" * 5000, "xxx... (5000 characters) is no whole"),
    ],
)
def test_a_number_of_any_length_is_one_short_line(text, message):
    error = fault(f"{RUN} --num-layers {text}")
    assert error.startswith("argument --num-layers: ") and message in error and len(error) < 250


def test_a_config_file_that_is_no_run_is_one_short_line(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("[]")
    error = fault(f"--config-json {path}")
    assert error.startswith(f"--config-json {path}: ") and len(error) < 400
