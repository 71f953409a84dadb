"""A path without a config.json: the message has what to give, or the command that fetches it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import read_hf_file

NOTHING_DOWNLOADED = "No such file or directory). Give a config.json on this machine, or the folder"


@pytest.mark.parametrize(
    ("path", "fetched"),
    [("meta-llama/Llama-3.1-8B", True), ("Llama-3.1-8B", False), ("/nowhere/Llama-3.1-8B", False)],
)
def test_a_name_of_the_hub_gets_the_command_that_fetches_it(
    path: str, fetched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        read_hf_file(Path(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be read ({NOTHING_DOWNLOADED}")
    assert message.endswith(f"hf download {path} config.json --local-dir {path}") == fetched


def test_a_folder_without_a_config_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_hf_file(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/config.json: cannot be read (No such file or directory)"
    )
