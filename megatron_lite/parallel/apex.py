"""Finds the kernels of NVIDIA apex by their symbols, or the reason why one cannot be used.

    module                            symbol                          used by
    fused_weight_gradient_mlp_cuda    wgrad_gemm_accum_fp32           sums of weight gradients,
                                                                      weight_gradient.py
    apex.optimizers                   FusedAdam                       --optimizer-impl apex,
      (kernels in amp_C)                                              optim/adam_update.py
    apex.normalization                FusedLayerNormAffineFunction,   --norm-impl apex,
      (fused_layer_norm_cuda)         FusedRMSNormAffineFunction      model/norm.py

apex is not a dependency. The package apex on PyPI is an unrelated toolkit for Pyramid. This module
recognises that package by its files and never imports it. The import of NVIDIA's apex may raise any
error (another torch, another CUDA). Such an error becomes the reason and does not end the run.
docs/performance.md describes what each kernel does and how to install apex.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_lite.config.checks import InputError

DEVICE_TYPE = "cuda"  # the only device type that apex has kernels for
NORMS = ("fused_layer_norm_cuda", "apex.normalization.fused_layer_norm")
INSTALL = (
    "install NVIDIA's apex (in a clone of https://github.com/NVIDIA/apex: APEX_CPP_EXT=1 "
    "APEX_CUDA_EXT=1 pip install -v --no-build-isolation . ; the apex on PyPI is another package; "
    "see docs/performance.md)"
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of apex, or the reason why it cannot be used.

    value: the function or class, or None if it cannot be used.
    reason: why it cannot be used.
    remedy: how to make it usable.
    """

    value: Any = None
    reason: str = ""
    remedy: str = INSTALL


@dataclass(frozen=True)
class Package:
    """The package that `import apex` would find. place: its folder or file."""

    kind: Literal["absent", "nvidia", "other"]
    place: str = ""


def weight_gradient_kernel(device_type: str) -> Kernel:
    """Finds `wgrad_gemm_accum_fp32(input, grad_output, main_grad)`.

    The kernel adds grad_output^T input to main_grad [out, in], float32.
    """
    return _extension(device_type, "fused_weight_gradient_mlp_cuda", ("wgrad_gemm_accum_fp32",))


def layer_norm(device_type: str) -> Kernel:
    """Finds the autograd Function of (input, weight, bias, normalized_shape, eps)."""
    symbols = ("forward_affine", "backward_affine")
    return _python(device_type, *NORMS, symbols, "FusedLayerNormAffineFunction")


def rms_norm(device_type: str) -> Kernel:
    """Finds the autograd Function of (input, weight, normalized_shape, eps)."""
    symbols = ("rms_forward_affine", "rms_backward_affine")
    return _python(device_type, *NORMS, symbols, "FusedRMSNormAffineFunction")


def fused_adam(device_type: str) -> Kernel:
    """Finds the class FusedAdam.

    Its release must have a capturable mode, which can skip a step on the device without waiting for
    the device.
    """
    symbols = ("multi_tensor_adam", "multi_tensor_adam_capturable")
    kernel = _python(device_type, "amp_C", "apex.optimizers", symbols, "FusedAdam")
    if kernel.value is not None and "capturable" not in inspect.signature(kernel.value).parameters:
        return Kernel(
            reason="this release of apex is too old: its FusedAdam has no capturable mode, "
            "without which a step cannot "
            "be skipped on the device"
        )
    return kernel


def require(kernel: Kernel, flag: str) -> Any:
    """Returns the kernel's value. Raises InputError with the reason if it has none."""
    if kernel.value is None:
        raise InputError(
            f"{flag} apex cannot be used: {kernel.reason}. Give {flag} torch, or {kernel.remedy}"
        )
    return kernel.value


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


def notice() -> str | None:
    """Returns a line about a package called apex that is not NVIDIA's, or None without one."""
    package = installed_package()
    if package.kind != "other":
        return None
    return (
        f"the package apex in {package.place} is not NVIDIA's and is not used: PyPI has an "
        "unrelated toolkit for Pyramid under this name (NVIDIA's: docs/performance.md)"
    )


def _python(
    device_type: str, extension: str, module: str, symbols: Sequence[str], symbol: str
) -> Kernel:
    """Finds a symbol of one of apex's Python modules.

    The symbol works only if the extension module has all of `symbols` too.
    """
    kernel = _extension(device_type, extension, symbols)
    if kernel.value is None:
        return kernel
    if installed_package().kind != "nvidia":
        return Kernel(reason=f"{_reason_without(module)}, only its extension {extension}")
    return _symbol(module, (symbol,))


def _extension(device_type: str, extension: str, symbols: Sequence[str]) -> Kernel:
    """Finds the first of `symbols` in an extension module that has all of them.

    Releases of apex have put their extension modules at the top level or inside the package.
    """
    if device_type != DEVICE_TYPE:
        return Kernel(
            reason=f"NVIDIA apex has kernels for {DEVICE_TYPE} and this run is on {device_type}",
            remedy="run it on a GPU",
        )
    kernel = _symbol(extension, symbols)
    if kernel.value is None and installed_package().kind == "nvidia":
        inside = _symbol(f"apex._extensions.{extension}", symbols)
        return kernel if inside.value is None else inside
    return kernel


def _symbol(module_name: str, symbols: Sequence[str]) -> Kernel:
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an extension built for another torch may raise any
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            return Kernel(reason=_reason_without(module_name))
        text = " ".join(str(error).split()) or "no message"
        return Kernel(
            reason=f"importing {module_name} fails ({type(error).__name__}: {text[:200]})"
        )
    lacking = [symbol for symbol in symbols if getattr(module, symbol, None) is None]
    if lacking:
        place = getattr(module, "__file__", None) or "this environment"
        return Kernel(
            reason=f"{module_name} in {place} has no {' and no '.join(lacking)}: it is of another "
            "release of apex"
        )
    return Kernel(getattr(module, symbols[0]))


def _reason_without(module_name: str) -> str:
    """Returns why this environment has no such module of apex."""
    package = installed_package()
    if package.kind == "nvidia":
        return f"apex is installed without {module_name}, as it is without its CUDA extensions"
    if package.kind == "other":
        return f"the package apex in {package.place} is not NVIDIA's"
    return "NVIDIA apex is not installed"
