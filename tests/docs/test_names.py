"""The last part of docs/coming-from.md: every name on our side exists."""

import re
from pathlib import Path

from arguments import build_parser, supported_flags

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text().partition("## Names of functions")[2]
LINES = [line for line in PAGE.splitlines() if re.match(r"\| (?!theirs)", line)]
ROWS = [line.strip("|").split("|")[1] for line in LINES]


def test_every_row_has_names_of_ours_that_exist_or_none():
    for ours in ROWS:
        places = re.findall(r"((?:`[\w.]+` and )?`[\w.]+`) in `([\w/]+\.py)`", ours)
        # Every file on our side belongs to a name.
        assert len(places) == ours.count(".py`"), ours
        assert places or ours.split(":")[0].strip() == "none", ours
        for names, file in places:
            (path,) = (one for one in (ROOT / "megatron_lite" / file, ROOT / file) if one.exists())
            parts = set(re.findall(r"\w+", names.replace(" and ", " ")))
            assert parts <= set(re.findall(r"\w+", path.read_text())), ours


def test_every_flag_on_the_page_is_one_of_the_launcher():
    flags = {flag for row in ROWS for flag in re.findall(r"`(--[^`]+)`", row)}
    assert flags and flags <= set(supported_flags(build_parser()))
