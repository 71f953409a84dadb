"""Packages that are not installed, or are."""

from __future__ import annotations

import sys

import pytest


def provide(patch: pytest.MonkeyPatch, name: str, module):
    """Makes an import of this name find the module. None: the import fails."""
    patch.setitem(sys.modules, name, module)
