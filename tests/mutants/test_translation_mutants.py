"""Mistakes in reading somebody else's config file, and a launcher's local rank, each put back: a
named test must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lite.parallel import launch
from megatron_lite.tools import config_file, modalities, translate_recompute, translators
from megatron_lite.tools.translation import ConfigReader, Translation
from tests.parallel import test_launch_environment
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.tools import test_config_file, test_presets, test_translate_recompute, test_whole_configs

Patch = pytest.MonkeyPatch


@replaces("note_elsewhere", ConfigReader)
def other_keys_of_the_file_are_passed_over(_, self, read):
    pass


@replaces("for_layers", Translation)
def a_rule_may_name_layers_that_do_not_exist(_, self, num_layers):
    return self


@replaces("_size_of_file", translators)
def the_file_has_no_say_in_the_tensor_parallel_size(_, *given):
    return "", None


@replaces("_memory_efficient_wrapping", translators)
def wrapping_is_dropped(_, reader, given):
    return False


@replaces("flags", Translation)
def a_flag_is_printed_without_the_one_it_needs(flags, self):
    return tuple(word for word in flags(self) if word != "--use-torch-fsdp2")


@replaces("_reached", modalities)
def a_component_recomputes_though_the_run_does_not_use_it(_, config, start):
    return {part.place for part in modalities._components(config)}


@replaces("resolved", ConfigReader)
def an_interpolation_is_taken_as_text(_, self, value, where):
    return value


@replaces("values", ConfigReader)
def a_bool_passes_for_a_number(values: Any, self: ConfigReader, given: Any, keys: Any) -> Any:
    numbers = {
        key: int(value)
        for key, value in given.items()
        if isinstance(value, bool) and key in keys and keys[key].kinds == (int,)
    }
    return values(self, {**given, **numbers}, keys)


@replaces("systems_of", translate_recompute)
def whatever_system_is_named_is_believed(_, config):
    return ()


@replaces("compose_node", config_file._Loader)
def aliases_count_once(_, self, parent, index):
    return yaml.SafeLoader.compose_node(self, parent, index)


@replaces("compose_mapping_node", config_file._Loader)
def the_last_of_two_equal_keys_wins(_, self, anchor):
    return yaml.SafeLoader.compose_mapping_node(self, anchor)


@replaces("_check_depth", config_file)
def a_files_depth_is_not_bounded(_, config):
    pass


@replaces("_agreed_local_rank", launch)
def the_command_line_wins_over_the_environment(_, env, local_rank):
    return local_rank


def row_of(file: str) -> dict[str, Any]:
    """The parameters of the test of whole files for the first row with this file."""
    row = next(row for row in test_whole_configs.TRANSLATIONS if row[0] == file)
    return dict(zip(("file", "arguments", "printed", "notes"), row, strict=True))


MUTANTS = [
    Mutant(
        other_keys_of_the_file_are_passed_over,
        test_presets.test_a_file_of_nothing_but_such_keys_is_cut_short,
    ),
    Mutant(
        a_rule_may_name_layers_that_do_not_exist,
        test_whole_configs.test_the_launcher_accepts_every_translation,
        {"num_layers": 2},
    ),
    Mutant(
        the_file_has_no_say_in_the_tensor_parallel_size,
        test_whole_configs.test_a_whole_file_is_translated_without_saying_whose_it_is,
        row_of("oslo_v2.json"),
    ),
    Mutant(
        wrapping_is_dropped,
        test_presets.test_memory_efficient_wrapping_is_a_flag_of_fsdp2,
        {"keys": {"memory_efficient_wrapping": True}},
    ),
    Mutant(
        a_flag_is_printed_without_the_one_it_needs,
        test_whole_configs.test_the_launcher_accepts_every_translation,
        {"num_layers": 5},
    ),
    Mutant(
        a_component_recomputes_though_the_run_does_not_use_it,
        test_whole_configs.test_a_component_that_the_run_does_not_use_recomputes_nothing,
    ),
    Mutant(
        an_interpolation_is_taken_as_text,
        test_whole_configs.test_a_whole_file_is_translated_without_saying_whose_it_is,
        row_of("torchtune_selective.yaml"),
    ),
    Mutant(
        a_bool_passes_for_a_number,
        test_translate_recompute.test_a_value_of_the_wrong_type_is_one_line,
        {
            "name": "a.yaml",
            "message": "ac_freq must be int",
            "text": (
                "ac_variant: selective_layer_activation_checkpointing\nac_fun_params:\n  "
                "ac_freq: true"
            ),
        },
    ),
    Mutant(
        whatever_system_is_named_is_believed,
        test_whole_configs.test_another_systems_name_for_it_is_an_error,
        {"file": "torchtitan_debug.toml"},
    ),
    Mutant(
        aliases_count_once,
        test_config_file.test_a_file_that_will_not_do_is_one_line,
        {
            "name": "a.yaml",
            "text": b"a: &a [*a]",
            "message": "the alias 'a' stands inside its own value",
        },
    ),
    Mutant(
        the_last_of_two_equal_keys_wins,
        test_config_file.test_a_file_that_will_not_do_is_one_line,
        {"name": "a.yaml", "text": b"a: 1\na: 2", "message": "the key 'a' stands twice"},
    ),
    Mutant(
        a_files_depth_is_not_bounded,
        test_config_file.test_a_file_that_will_not_do_is_one_line,
        {"name": "a.json", "text": b"[" * 60 + b"]" * 60, "message": "more than 50 levels deep"},
    ),
    Mutant(
        the_command_line_wins_over_the_environment,
        test_launch_environment.test_a_local_rank_that_contradicts_the_environment_is_an_error,
        {"environ": {"LOCAL_RANK": "3"}, "local_rank": 0, "message": "contradicts"},
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mistake_is_seen(
    mutant: Mutant, monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path, capsys=capsys)
