"""The advice for a package that is missing: which extra of this project installs it.

The project is on no package index under this name, so the advice names the checkout, or the file
of the installed wheel.
"""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def install_advice(extra: str, root: Path = CHECKOUT) -> str:
    """Returns the command that installs an extra, such as "plot".

    root: the folder of the package's own folder. It is a checkout if it has a setup.py.
    """
    if (root / "setup.py").is_file():
        at = "" if root == Path.cwd() else f" (in {root})"
        return f"pip install -e '.[{extra}]'{at}"
    return f"pip install './FILE.whl[{extra}]', with the wheel that was installed for FILE.whl"
