"""Mistakes in reading somebody else's config file, each put back: a named test must fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_lite.tools import config_file, translators
from megatron_lite.tools.translation import Translation, everything
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.tools import test_config_file, test_whole_configs


@replaces("for_layers", Translation)
def a_rule_may_name_layers_that_do_not_exist(_, self, num_layers):
    return self


@replaces("_reached", translators)
def a_component_recomputes_though_the_run_does_not_use_it(_, config, start):
    return {place for place, _ in everything(config)}


@replaces("compose_node", config_file._Loader)
def aliases_count_once(_, self, parent, index):
    return yaml.SafeLoader.compose_node(self, parent, index)


MUTANTS = [
    Mutant(
        a_rule_may_name_layers_that_do_not_exist,
        test_whole_configs.test_the_launcher_accepts_every_translation,
        {"num_layers": 2},
    ),
    Mutant(
        a_component_recomputes_though_the_run_does_not_use_it,
        test_whole_configs.test_a_component_that_the_run_does_not_use_recomputes_nothing,
    ),
    Mutant(aliases_count_once, test_config_file.test_aliases_count_as_often_as_they_are_used),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mistake_is_seen(
    mutant: Mutant,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path, capsys=capsys)
