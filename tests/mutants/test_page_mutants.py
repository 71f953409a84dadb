"""Mistakes in the HTML pages, each put back: a named test must fail."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from megatron_lite.pages import run_record
from tests.pages import test_run_page
from tests.support.mutants import Mutant, assert_seen, replaces


@replaces("Environment", jinja2)
def the_template_escapes_nothing(environment, **options):
    return environment(**{**options, "autoescape": False})


@replaces("figure", run_record)
def a_number_that_is_infinite_counts(number, value):
    return value if isinstance(value, float) else number(value)


MUTANTS = [
    Mutant(the_template_escapes_nothing, test_run_page.test_hostile_texts_are_text),
    Mutant(
        a_number_that_is_infinite_counts,
        test_run_page.test_rows_that_are_garbled_are_counted_and_numbers_that_are_none_are_gaps,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_named_test_fails(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
