"""Packages that are not installed, or are."""

import sys


def provide(patch, name, module):
    """Makes an import of this name find the module. None: the import fails."""
    patch.setitem(sys.modules, name, module)
