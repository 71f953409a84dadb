"""A Megatron checkpoint under --load of a run, and its conversion by the command that the answer
gives."""

import re
import shlex

import pytest
import torch

from megatron_lite.checkpointing.start import find_step
from megatron_lite.config.checks import InputError
from megatron_lite.config.experts import ExpertSettings
from megatron_lite.convert.megatron.args import ONLY_HERE, SHARED
from megatron_lite.convert.weights import WeightSource
from megatron_lite.tools import convert
from megatron_lite.tools.convert import formats
from tests.convert.megatron.test_legacy_layouts import LAYOUTS, save
from tests.support.equality import LATENT
from tests.support.models import tiny_config
from tests.support.pairs import in_one_test
from tests.support.runs import run_to_end, tiny_run

# Megatron-LM's names of what ModelConfig describes, in megatron/training/arguments.py.
ARGUMENTS = """
    num_layers hidden_size num_attention_heads max_position_embeddings ffn_hidden_size kv_channels
    group_query_attention num_query_groups position_embedding_type rotary_base rotary_percent
    use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor no_rope_freq
    normalization norm_epsilon apply_layernorm_1p qk_layernorm swiglu squared_relu bias_gelu_fusion
    add_bias_linear add_qkv_bias untie_embeddings_and_output_weights attention_softmax_in_fp32
    window_size window_attn_skip_freq hidden_dropout attention_dropout init_method_std
    fp32_residual_connection rotary_interleaved
"""


@pytest.mark.parametrize(
    "format_name", ["megatron", pytest.param("megatron-dist", marks=pytest.mark.long)]
)
def test_the_answer_to_a_megatron_checkpoint_is_a_command_that_works(format_name, tmp_path, capsys):
    theirs, ours = tmp_path / "a folder of theirs", tmp_path / "ours"
    run_to_end(tiny_run(train_iters=2, save=ours, save_interval=2))
    formats()[format_name].write(formats()["megatron-lite"].source(ours), theirs)
    with pytest.raises(InputError, match="is a checkpoint of Megatron-LM"):
        run_to_end(tiny_run(load=theirs / "iter_0000002"))
    with pytest.raises(InputError, match="is a checkpoint of Megatron-LM") as error:
        find_step(str(theirs))
    command = re.search(r"python -m megatron_lite convert (.*)", str(error.value))
    assert command is not None
    assert convert.main(shlex.split(command[1])) == 0
    assert "converted from" in capsys.readouterr().out
    converted = tmp_path / "a folder of theirs-converted"
    assert str(converted) in str(error.value)
    # The run goes on from iteration 2, with the same optimizer states.
    assert run_to_end(tiny_run(train_iters=3, load=converted)).progress.iteration == 3


def test_each_format_names_the_other_one(tmp_path):
    save(tmp_path / "legacy", tiny_config(num_layers=5), LAYOUTS["one file"])
    with pytest.raises(InputError, match="one of --from megatron$"):
        formats()["megatron-dist"].source(tmp_path / "legacy")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / ".metadata").touch()
    with pytest.raises(InputError, match="one of --from megatron-dist"):
        formats()["megatron"].source(tmp_path / "dist")
    (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(InputError, match="lacks latest_checkpointed.*--load .*/iter_0000040"):
        formats()["megatron"].source(tmp_path / "legacy")


@in_one_test(
    "change, message",
    [
        (dict(parallel_residual=True), "parallel_residual = .*Megatron-LM"),
        (
            dict(LATENT, position_embedding_type="rope", latent_norm_epsilon=1e-3),
            "latent_norm_epsilon = .*Megatron-LM",
        ),
        (dict(norm_position="after"), "norm_position = .*Megatron-LM"),
        (dict(bias_gelu_fusion=True, add_bias_linear=False), "bias_gelu_fusion = .*Megatron-LM"),
        ({}, "momentum, and only those of Adam"),
    ],
)
def test_what_megatron_lacks_is_refused_by_name(change, message, tmp_path):
    source = WeightSource(
        model=tiny_config(**change),
        true_vocab_size=9,
        dtypes={},
        read=torch.zeros,
        state_keys=("momentum",),
    )
    for name in ("megatron", "megatron-dist"):
        with pytest.raises(InputError, match=message):
            formats()[name].write(source, tmp_path / "out")


def test_every_field_of_the_model_is_an_argument_of_megatron_or_is_listed():
    """A new field of ModelConfig belongs to ARGUMENTS, or to the fields that are refused."""
    assert {*ARGUMENTS.split(), *ExpertSettings.__dataclass_fields__} - ONLY_HERE.keys() == SHARED
