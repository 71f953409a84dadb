"""Which apex is installed, what of it can be used, and the reason where it cannot: nothing here may
crash or be silent."""

import contextlib
import importlib
import io
import sys

import pytest

from megatron_lite.parallel.apex import installed_package, weight_gradient_kernel
from megatron_lite.training.apex_kernels import kernel_of_apex
from tests.support import apex as stand_in
from tests.support.runs import run_to_end, tiny_run
from tests.support.torch_features import NEEDS_GRAD_DTYPE

EXTENSION = "fused_weight_gradient_mlp_cuda"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes modules (by their dotted names) that can be imported, each folder a package. A run on
    this CPU may use what they hold, as it would on a GPU."""
    stand_in.has_kernels_for(monkeypatch, "cpu")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(modules):
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in tmp_path.rglob("*"):
            if folder.is_dir():
                (folder / "__init__.py").touch()
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", EXTENSION):
            del sys.modules[name]


def log_of_a_run():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_to_end(tiny_run(bf16=True, train_iters=1, eval_iters=0))
    return out.getvalue().splitlines()


def test_no_kernel_is_used_on_another_device(monkeypatch):
    stand_in.install(monkeypatch)
    stand_in.has_kernels_for(monkeypatch, "cuda")
    reason = "NVIDIA apex has kernels for cuda and this run is on cpu"
    assert kernel_of_apex("cpu") == (None, reason)
    assert kernel_of_apex("cuda")[0] is not None


@pytest.mark.parametrize(
    "init", ["from pyramid_mailer.interfaces import IMailer", "raise SystemExit(3)", "x = 1"]
)
def test_the_toolkit_of_that_name_on_pypi_is_named_and_never_imported(packages, init):
    packages({"apex.lib.libapex": "groupfinder = 1", "apex.views": "", "apex.__init__": init})
    assert installed_package().kind == "other"
    kernel = weight_gradient_kernel()
    assert kernel.value is None and "is not NVIDIA's" in kernel.reason
    (line,) = (line for line in log_of_a_run() if line.startswith("weight gradients"))
    assert "the package apex in" in line and "is not NVIDIA's" in line
    assert "apex" not in sys.modules


def test_an_apex_without_its_cuda_extensions_says_so(packages):
    packages({"apex.optimizers.fused_adam": "class FusedAdam: pass"})
    reason = f"apex is installed without {EXTENSION}, as it is without its CUDA extensions"
    assert weight_gradient_kernel().reason == reason


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "fails (ImportError: libcudart.so.12: cannot open",
        ),
        (
            "raise OSError('undefined symbol:\\n _ZN2at')",
            "fails (OSError: undefined symbol: _ZN2at)",
        ),
        (
            "wgrad_gemm_accum_fp32 = None",
            "has no wgrad_gemm_accum_fp32: it is of another release of apex",
        ),
    ],
)
def test_an_extension_that_cannot_be_used_is_a_reason_in_the_log_and_no_crash(
    packages, text, reason
):
    packages({EXTENSION: text})
    assert reason in weight_gradient_kernel().reason
    (line,) = (line for line in log_of_a_run() if line.startswith("weight gradients"))
    assert ": 9 weights by the layer's backward" in line and reason in line
