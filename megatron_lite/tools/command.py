"""What the command-line tools share: how a fault in the input ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_lite.config.checks import InputError


def exit_status(command: Callable[[], None]) -> int:
    """Runs the command. 0 when done; 2 with `error: ...` on stderr for what the user can mend, without a traceback."""
    try:
        command()
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
