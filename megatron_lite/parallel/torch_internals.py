"""The private names of torch that this library uses. No other module reaches for one.

torch may rename or remove such a name in any release. If it did, an import of this module still
succeeds: a stand-in takes the place of the name, and a use of the stand-in raises an InputError
that names torch's version, the name, and the feature that needs it. Everything else works.
`missing` lists such names.

    private      an object of a module that `import torch` has loaded already
    attribute    a function that reads a private attribute of its argument
    late         a function without arguments that returns an object of a module that few runs need

Operators (`torch.ops`) are not listed, since torch changes their schemas only with a deprecation.
The dictionaries `_parameters` and `_buffers` of a module are not either, since every subclass of
nn.Module relies on them.
"""

from __future__ import annotations

import operator
import pkgutil
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed
from torch.autograd import forward_ad

from megatron_lite.config.checks import InputError

# The releases that tests/torch_versions.sh has tried, as in setup.py.
OLDEST = "2.8"
FIRST_UNTRIED = "2.15"


class Missing:
    """Stands for a name that this torch lacks.

    It can be imported, be a base class and be compared with; every other use raises InputError.
    """

    def __init__(self, path: str, feature: str) -> None:
        self._path, self._feature = path, feature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these to learn what kind of object it is
            raise AttributeError(name)
        raise self._error()

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (type("MissingBase", (), {"__init__": self.__call__}),)

    def _error(self) -> InputError:
        return InputError(
            f"torch {torch.__version__} has no {self._path}, which is needed for {self._feature}: "
            f"install torch>={OLDEST},<{FIRST_UNTRIED}, the releases that were tried"
        )


def missing(*, also_late: bool = False) -> dict[str, str]:
    """Returns the names that this torch lacks, each with the feature that needs it.

    also_late: whether to look for the names of `late` too, which imports their modules in seconds.
    """
    names = _PRESENT | (_LATE if also_late else {})
    return {
        path: feature
        for path, (feature, instead) in names.items()
        if isinstance(_taken(path, feature, instead), Missing)
    }


def missing_notices() -> tuple[str, ...]:
    """Returns one line about the names that this torch lacks, if there are any."""
    lacks = "; ".join(f"{path} (for {feature})" for path, feature in missing().items())
    return (f"torch {torch.__version__} lacks {lacks}: these features raise an error",) * bool(
        lacks
    )


def private(path: str, feature: str, *, instead: str | None = None) -> Any:
    """Returns the object at a dotted path, or a Missing.

    feature: what needs it, for messages.
    instead: the path to use in a torch without the first one.
    """
    _PRESENT[path] = feature, instead
    return _taken(path, feature, instead)


def attribute(path: str, feature: str) -> Any:
    """Returns a function that reads the last name of the path from its argument, or a Missing."""
    found = private(path, feature)
    return found if isinstance(found, Missing) else operator.attrgetter(path.rpartition(".")[2])


def late(path: str, feature: str) -> Callable[[], Any]:
    """Returns a function that imports the module, and returns the object or a Missing."""
    _LATE[path] = feature, None
    return partial(_taken, path, feature)


def _taken(path: str, feature: str, instead: str | None = None) -> Any:
    for place in (path, instead):
        try:
            if place is not None:
                return pkgutil.resolve_name(place)
        except (ImportError, AttributeError):
            continue
    return Missing(path, feature)


# path: (feature, instead)
_PRESENT: dict[str, tuple[str, str | None]] = {}
_LATE: dict[str, tuple[str, str | None]] = {}

_COLLECTIVES = "communication between ranks"
_RECOMPUTE = "recomputation"
_METERS = "measuring memory"
_UPDATE = "the optimizer's step"
_KERNELS = "--torch-compile"
_DRY_RUN = "a dry run"

# Dispatch modes: whether one is active, and which.
num_dispatch_modes = private("torch._C._len_torch_dispatch_stack", _COLLECTIVES)
dispatch_modes = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", _COLLECTIVES
)
TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", _METERS)
# The modes of torch's own selective checkpoint, in its forward and in its replay.
CachingMode = private("torch.utils.checkpoint._CachingTorchDispatchMode", _COLLECTIVES)
CachedMode = private("torch.utils.checkpoint._CachedTorchDispatchMode", _COLLECTIVES)
disable_current_modes = private(
    "torch.utils._python_dispatch._disable_current_modes", f"--recompute-verify and {_KERNELS}"
)

# Process groups.
world = private("torch.distributed.distributed_c10d._world", _COLLECTIVES)
set_group_timeout = private("torch.distributed.distributed_c10d._set_pg_timeout", _COLLECTIVES)
default_store = private(
    "torch.distributed.distributed_c10d._get_default_store", "the watch over other ranks"
)
group_of_name = private(
    "torch.distributed.distributed_c10d._resolve_process_group", "context parallelism"
)
flattened_mesh = private(
    "torch.distributed.device_mesh.DeviceMesh._flatten", "data and context parallelism together"
)

# Storages and tensors. The address of a storage is the key for it in a dictionary; the version of a
# tensor is the number of writes to it; the base is what a view is a view of.
address_of = attribute("torch.UntypedStorage._cdata", f"{_RECOMPUTE} and {_METERS}")
write_count_of = attribute("torch.Tensor._version", _RECOMPUTE)
base_of = attribute("torch.Tensor._base", "--use-torch-fsdp2")
is_view = private("torch.Tensor._is_view", _RECOMPUTE)
sparse_indices = private("torch.Tensor._indices", _RECOMPUTE)
sparse_values = private("torch.Tensor._values", _RECOMPUTE)
num_users_of_tensor = private("torch.Tensor._use_count", f"--use-torch-fsdp2 and {_METERS}")
num_users_of_storage = private("torch._C._storage_Use_Count", f"--use-torch-fsdp2 and {_METERS}")
fills_its_memory = private(
    "torch._prims_common.is_non_overlapping_and_dense_or_false",
    _METERS,
    instead="torch._prims_common.is_non_overlapping_and_dense",  # torch 2.8 and 2.9
)

# Autograd: the running backward, its node, and the hooks on saved tensors.
engine = private("torch.autograd.Variable._execution_engine", _RECOMPUTE)
is_plain_backward = private("torch.autograd._is_checkpoint_valid", _RECOMPUTE)
current_backward = private("torch._C._current_graph_task_id", _RECOMPUTE)
backward_keeps_graph = private(
    "torch._C._autograd._get_current_graph_task_keep_graph", "the cross entropy of split logits"
)
saved_tensors_hooks_in_force = private(
    "torch._C._autograd._top_saved_tensors_default_hooks", _RECOMPUTE
)
without_dispatch_key = private("torch._C._SetExcludeDispatchKeyGuard", f"{_RECOMPUTE} with ops(..)")
KEY_OF_VERSIONS = private("torch._C.DispatchKey.ADInplaceOrView", f"{_RECOMPUTE} with ops(..)")
current_node = private("torch._C._current_autograd_node", f"{_RECOMPUTE} and {_METERS}")
next_node_number = private("torch.autograd._get_sequence_nr", f"{_RECOMPUTE} and {_METERS}")
number_function_of = attribute("torch._C._FunctionBase._sequence_nr", _METERS)

PythonNode = private("torch.autograd.function.BackwardCFunction", _RECOMPUTE)
without_torch_function = private("torch._C.DisableTorchFunction", _RECOMPUTE)


transforms_in_force = private("torch._C._functorch.peek_interpreter_stack", _RECOMPUTE)


def is_transformed() -> bool:
    """Tells whether a forward runs under a transform of torch: forward-mode differentiation
    (`dual_level`), `torch.func` (`grad`, `vmap`, `jvp`), or `torch.jit.trace`.
    """
    return (
        getattr(forward_ad, "_current_level", -1) >= 0
        or transforms_in_force() is not None
        or torch.jit.is_tracing()
    )


# Modes on torch's functions (a default device is one), and hooks on all modules.
function_modes = private("torch.overrides._get_current_function_mode_stack", _RECOMPUTE)
push_function_mode = private("torch.overrides._push_mode", _RECOMPUTE)
pop_function_mode = private("torch.overrides._pop_mode", _RECOMPUTE)
hooks_of_all_modules = tuple(
    private(f"torch.nn.modules.module._global_{name}", _RECOMPUTE)
    for name in (
        "forward_pre_hooks",
        "forward_hooks",
        "forward_hooks_always_called",
        "forward_hooks_with_kwargs",
        "backward_pre_hooks",
        "backward_hooks",
    )
)
attention_kernels = private("torch.nn.attention._cur_sdpa_kernel_backends", _RECOMPUTE)
choose_attention_kernels = private("torch.nn.attention._sdpa_kernel", _RECOMPUTE)

# Trees of tensors, in arguments and results.
tree_flatten = private("torch.utils._pytree.tree_flatten", _RECOMPUTE)
tree_flatten_with_path = private("torch.utils._pytree.tree_flatten_with_path", _RECOMPUTE)
tree_leaves = private("torch.utils._pytree.tree_leaves", f"{_RECOMPUTE} and {_METERS}")
tree_map = private("torch.utils._pytree.tree_map", f"{_RECOMPUTE} and {_KERNELS}")
tree_unflatten = private("torch.utils._pytree.tree_unflatten", _RECOMPUTE)
tree_path_text = private("torch.utils._pytree.keystr", _RECOMPUTE)

# Operators: the schema of one, and those that take lists of tensors.
schema_of = attribute("torch.ops.aten.relu.default._schema", f"{_RECOMPUTE} with ops(..)")
foreach_copy_ = private("torch._foreach_copy_", _UPDATE)
foreach_mul_ = private("torch._foreach_mul_", _UPDATE)
foreach_norm = private("torch._foreach_norm", _UPDATE)

# The compiler. `disable_dynamo` keeps it out of a function; the public one imports all of dynamo.
disable_dynamo = private(
    "torch._compile._disable_dynamo", "torch.compile", instead="torch.compiler.disable"
)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function so that a compiler that is in use does not trace it. A `def`, no method.

    It would trace hooks that operators in an uncompiled part call, and make their objects twice.
    """
    return disable_dynamo(function) if "torch._dynamo" in sys.modules else function


inductor_compile = late("torch._inductor.compile", _KERNELS)
compiler_settings = late("torch._functorch.config", "--activation-memory-budget")

# Tensors and ranks without memory and processes.
FakeTensorMode = private(
    "torch._subclasses.fake_tensor.FakeTensorMode", f"{_DRY_RUN} and the converter to Megatron"
)
fake_work = private("torch._C._distributed_c10d.FakeWork", _DRY_RUN)
has_kernel_for = private("torch._C._dispatch_has_kernel_for_dispatch_key", _DRY_RUN)
fake_store = late("torch.testing._internal.distributed.fake_pg.FakeStore", _DRY_RUN)

# The place of a tensor in a file of torch.distributed.checkpoint.
storage_info = late(
    "torch.distributed.checkpoint.filesystem._StorageInfo", "the converter to Megatron"
)

# The history of the memory of a GPU.
record_memory_history = private(
    "torch.cuda.memory._record_memory_history", "--record-memory-history"
)
write_memory_history = private("torch.cuda.memory._dump_snapshot", "--record-memory-history")


def is_fake(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor is one of FakeTensorMode: it has a shape and no values."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


@lru_cache
def cpu_attention_takes_groups() -> bool:
    """Returns whether a head of the CPU's flash kernel finds the key and value of its group.

    Before torch 2.9 the kernel reads past the last group's key and value, and computes something
    else. Here it finds a second head, since key and value are parts of larger tensors.
    """
    with disable_current_modes(), torch.no_grad():
        heads = torch.arange(2.0).view(1, 2, 1, 1)  # [b, a, s, d]
        group = heads[:, :1]
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, group, group)
        return output[0, 1].item() == 0.0
