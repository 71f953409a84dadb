"""The advice for a package that is missing: which extra of this project installs it.

The project is on no package index under this name, so the advice names the checkout, or the file
of the installed wheel.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError

CHECKOUT = Path(__file__).resolve().parents[2]


def install_advice(extra: str, root: Path = CHECKOUT) -> str:
    """Returns the command that installs an extra, such as "plot".

    root: the folder of the package's own folder. It is a checkout if it has a setup.py.
    """
    if (root / "setup.py").is_file():
        at = "" if root == Path.cwd() else f" (in {root})"
        return f"pip install -e '.[{extra}]'{at}"
    return f"pip install './FILE.whl[{extra}]', with the wheel that was installed for FILE.whl"


def module_of_extra(module: str, extra: str, *, needed_by: str) -> Any:
    """Imports a module of an optional package, at the time when it is needed.

    needed_by: what needs it, such as "--wandb-project demo".
    Raises InputError that names the package and the extra if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise InputError(
            f"{needed_by} needs the package {package}, which is not installed: "
            f"{install_advice(extra)}"
        ) from None
