"""The command line of the conversion tool."""

import pytest

from tests.support.conversions import refusal, saved_peer

ERROR = "python -m megatron_lite.tools.convert: error: "

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "theirs"
    saved_peer("llama", folder)
    return folder


@pytest.mark.parametrize(
    "way, flags, message",
    [
        ("hf hf", ["--tensor-model-parallel-size", "2"], "does not apply to --to hf: leave it out"),
        ("hf hf", ["--pipeline-model-parallel-size", "0"], "must be at least 1 (got 0)"),
        ("hf megatron-lite", ["--hf-family", "llama"], "--hf-family llama does not apply"),
        ("hf hf", ["--hf-family", "gpt2"], "--hf-family gpt2 does not express this model"),
        (
            "hf megatron-lite",
            ["--tensor-model-parallel-size", "3"],
            "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3",
        ),
        (
            "hf megatron-lite",
            ["--pipeline-model-parallel-size", "5"],
            "--num-layers 2 is not divisible by --pipeline-model-parallel-size (5)",
        ),
        ("megatron-lite hf", [], "no checkpoint there (no latest_checkpointed_iteration.txt)"),
    ],
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(way, flags, message, theirs, tmp_path):
    source, target = way.split()
    error = refusal(tmp_path, f"{source} {theirs} -> {target} new", *flags)
    assert message in error and error.startswith(ERROR) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
