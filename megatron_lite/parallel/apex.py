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


class _Unusable(Exception):
    """Why a kernel of apex cannot be used."""


def weight_gradient_kernel(device_type: str) -> Kernel:
    """Finds `wgrad_gemm_accum_fp32(input, grad_output, main_grad)`.

    The kernel adds grad_output^T input to main_grad [out, in], float32.
    """
    return _kernel(device_type, "fused_weight_gradient_mlp_cuda", ("wgrad_gemm_accum_fp32",))


def layer_norm(device_type: str) -> Kernel:
    """Finds the autograd Function of (input, weight, bias, normalized_shape, eps)."""
    return _norm(device_type, ("forward_affine", "backward_affine"), "LayerNorm")


def rms_norm(device_type: str) -> Kernel:
    """Finds the autograd Function of (input, weight, normalized_shape, eps)."""
    return _norm(device_type, ("rms_forward_affine", "rms_backward_affine"), "RMSNorm")


def _norm(device_type: str, symbols: Sequence[str], norm: str) -> Kernel:
    user = "apex.normalization.fused_layer_norm", f"Fused{norm}AffineFunction"
    return _kernel(device_type, "fused_layer_norm_cuda", symbols, user)


def fused_adam(device_type: str) -> Kernel:
    """Finds the class FusedAdam.

    Its release must have a capturable mode, which can skip a step on the device without waiting for
    the device.
    """
    symbols = ("multi_tensor_adam", "multi_tensor_adam_capturable")
    kernel = _kernel(device_type, "amp_C", symbols, ("apex.optimizers", "FusedAdam"))
    if kernel.value is not None and "capturable" not in inspect.signature(kernel.value).parameters:
        return Kernel(
            reason="this release of apex is too old: its FusedAdam has no capturable mode, "
            "without which a step cannot be skipped on the device"
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


def _kernel(
    device_type: str, extension: str, symbols: Sequence[str], user: tuple[str, str] | None = None
) -> Kernel:
    """Finds the first of `symbols` in an extension module that has all of them.

    user: the module and the name in it that use the symbols. That name is found instead.
    """
    if device_type != DEVICE_TYPE:
        return Kernel(
            reason=f"NVIDIA apex has kernels for {DEVICE_TYPE} and this run is on {device_type}",
            remedy="run it on a GPU",
        )
    is_nvidia = installed_package().kind == "nvidia"
    try:
        try:
            value = _symbol(extension, symbols)
        except _Unusable as error:
            # Releases of apex have put their extensions at the top level or inside the package.
            try:
                value = _symbol(f"apex._extensions.{extension}", symbols) if is_nvidia else None
            except _Unusable:
                value = None
            if value is None:
                raise error
        if user is not None:
            if not is_nvidia:
                raise _Unusable(f"{_reason_without(user[0])}, only its extension {extension}")
            value = _symbol(user[0], user[1:])
    except _Unusable as error:
        return Kernel(reason=str(error))
    return Kernel(value)


def _symbol(module_name: str, symbols: Sequence[str]) -> Any:
    """Returns the first of the symbols of a module that has all of them."""
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an extension built for another torch may raise any
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            raise _Unusable(_reason_without(module_name)) from None
        text = " ".join(str(error).split()) or "no message"
        raise _Unusable(
            f"importing {module_name} fails ({type(error).__name__}: {text[:200]})"
        ) from None
    lacking = [symbol for symbol in symbols if getattr(module, symbol, None) is None]
    if lacking:
        place = getattr(module, "__file__", None) or "this environment"
        raise _Unusable(
            f"{module_name} in {place} has no {' and no '.join(lacking)}: it is of another "
            "release of apex"
        )
    return getattr(module, symbols[0])


def _reason_without(module_name: str) -> str:
    """Returns why this environment has no such module of apex."""
    package = installed_package()
    return {
        "nvidia": f"apex is installed without {module_name}, as it is without its CUDA extensions",
        "other": f"the package apex in {package.place} is not NVIDIA's",
        "absent": "NVIDIA apex is not installed",
    }[package.kind]
