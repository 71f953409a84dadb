"""Finds NVIDIA apex's kernel for sums of weight gradients, or the reason why it cannot be used.

apex is not a dependency. The package apex on PyPI is an unrelated toolkit for Pyramid. This module
recognises that package by its files and never imports it. The import of NVIDIA's apex may raise any
error (another torch, another CUDA). Such an error becomes the reason and does not end the run.
docs/performance.md describes what the kernel does and how to install apex.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

EXTENSION, SYMBOL = "fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"


class Kernel(NamedTuple):
    """A kernel of apex: its function, or None and the reason why it cannot be used."""

    value: Any = None
    reason: str = ""


class Package(NamedTuple):
    """The package that `import apex` would find. place: its folder or file."""

    kind: Literal["absent", "nvidia", "other"]
    place: str = ""


def weight_gradient_kernel() -> Kernel:
    """Finds `wgrad_gemm_accum_fp32(input, grad_output, main_grad)`.

    The kernel adds grad_output^T input to main_grad [out, in], float32.
    """
    found = _kernel(EXTENSION)
    # Releases of apex have put their extensions at the top level or inside the package.
    if found.value is None and installed_package().kind == "nvidia":
        inside = _kernel(f"apex._extensions.{EXTENSION}")
        found = found if inside.value is None else inside
    return found


def installed_package() -> Package:
    """Returns which package has the name apex in this environment. Imports nothing.

    A folder without `__init__.py` counts as absent. An example is a clone of apex's repository
    beside the program.
    """
    if (loaded := sys.modules.get("apex")) is not None:
        folders = [str(folder) for folder in getattr(loaded, "__path__", ())]
        place = getattr(loaded, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec("apex")
        except Exception:  # finders that other packages have installed
            spec = None
        if spec is None or spec.origin is None:
            return Package("absent")
        folders, place = list(spec.submodule_search_locations or ()), spec.origin
    is_nvidia = "apex.optimizers" in sys.modules or any(
        (Path(folder) / "optimizers").is_dir() for folder in folders
    )
    return Package("nvidia" if is_nvidia else "other", folders[0] if folders else str(place))


def _kernel(module_name: str) -> Kernel:
    """Finds the kernel in a module."""
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an extension built for another torch may raise any
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            return Kernel(reason=_reason_without(module_name))
        text = " ".join(str(error).split()) or "no message"
        why = f"{type(error).__name__}: {text[:200]}"
        return Kernel(reason=f"importing {module_name} fails ({why})")
    place = getattr(module, "__file__", None) or "this environment"
    return Kernel(
        getattr(module, SYMBOL, None),
        f"{module_name} in {place} has no {SYMBOL}: it is of another release of apex",
    )


def _reason_without(module_name: str) -> str:
    """Returns why this environment has no such module of apex."""
    package = installed_package()
    return {
        "nvidia": f"apex is installed without {module_name}, as it is without its CUDA extensions",
        "other": f"the package apex in {package.place} is not NVIDIA's",
        "absent": "NVIDIA apex is not installed",
    }[package.kind]
