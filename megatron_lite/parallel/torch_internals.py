"""The private names of torch that this library uses. No other module reaches for one.

torch may rename or remove such a name in any release. If it did, an import of this module still
succeeds: a stand-in takes the place of the name, and a use of the stand-in raises an InputError
that names torch's version and the name. Everything else works, and a run says at its start which
names are missing.

Operators (`torch.ops`) are not listed, since torch changes their schemas only with a deprecation.
The dictionaries `_parameters` and `_buffers` of a module are not either, since every subclass of
nn.Module relies on them.
"""

import operator
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed
from torch.autograd import forward_ad

from megatron_lite.config.checks import InputError

# The releases that tests/torch_versions.sh has tried, as in setup.py.
OLDEST = "2.8"
FIRST_UNTRIED = "2.16"
MISSING: list[str] = []  # the names that this torch lacks


class Missing:
    """Stands for a name that this torch lacks.

    It can be imported, be a base class and be compared with; every other use raises InputError.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"torch {torch.__version__} has no {self._path}, which is needed here: install "
            f"torch>={OLDEST},<{FIRST_UNTRIED}, the releases that were tried"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these to learn what kind of object it is
            raise AttributeError(name)
        return self()

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (type("MissingBase", (), {"__init__": self.__call__}),)


def private(path: str, *, instead: str | None = None) -> Any:
    """Returns the object at a dotted path, or a Missing.

    instead: the path to use in a torch without the first one.
    """
    for place in (path, instead):
        try:
            if place is not None:
                return pkgutil.resolve_name(place)
        except (ImportError, AttributeError):
            continue
    MISSING.append(path)
    return Missing(path)


def attribute(path: str) -> Any:
    """Returns a function that reads the last name of the path from its argument, or a Missing."""
    found = private(path)
    return found if isinstance(found, Missing) else operator.attrgetter(path.rpartition(".")[2])


# Dispatch modes: whether one is active, and which.
num_dispatch_modes = private("torch._C._len_torch_dispatch_stack")
dispatch_modes = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")
# The modes of torch's own selective checkpoint, in its forward and in its replay.
CachingMode = private("torch.utils.checkpoint._CachingTorchDispatchMode")
CachedMode = private("torch.utils.checkpoint._CachedTorchDispatchMode")
disable_current_modes = private("torch.utils._python_dispatch._disable_current_modes")

fused_adamw_ = private("torch._fused_adamw_")
# The product of groups of rows with a matrix each, (rows, matrices, offs=ends).
grouped_product = private("torch._grouped_mm")
grouped_operator = private("torch.ops.aten._grouped_mm.default")


class KeepsResults(TorchDispatchMode):  # type: ignore[valid-type, misc]
    """A dispatch mode that may keep the results of operators and return them again in a replay.

    Under it compiled functions stay compiled.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns what torch asks a mode before it compiles."""
        return True


# Process groups.
world = private("torch.distributed.distributed_c10d._world")
set_group_timeout = private("torch.distributed.distributed_c10d._set_pg_timeout")
default_store = private("torch.distributed.distributed_c10d._get_default_store")
group_of_name = private("torch.distributed.distributed_c10d._resolve_process_group")
flattened_mesh = private("torch.distributed.device_mesh.DeviceMesh._flatten")


def collectives_so_far() -> list[int]:
    """Returns how many collectives each group of this process has begun."""
    found = []
    for group in world.pg_map if torch.distributed.is_available() else ():
        with suppress(RuntimeError):  # some backends do not count
            found.append(group._get_sequence_number_for_group())
    return found


def unreduced_gradients(unit: Any) -> list[tuple[Any, str]]:
    """Returns the gradients of an FSDP2 unit whose sum over ranks is still to come: each as an
    object and its attribute."""
    group = unit._get_fsdp_state()._fsdp_param_group
    places = [
        place
        for each in (group.fsdp_params if group else ())
        for place in (
            (each, "unsharded_accumulated_grad"),
            (getattr(each, "_unsharded_param", None), "grad"),
        )
    ]
    return [(one, name) for one, name in places if getattr(one, name, None) is not None]


# Storages and tensors. The address of a storage is the key for it in a dictionary; the version of a
# tensor is the number of writes to it; the base is what a view is a view of.
address_of = attribute("torch.UntypedStorage._cdata")
write_count_of = attribute("torch.Tensor._version")
base_of = attribute("torch.Tensor._base")
compiled_call_of = attribute("torch.nn.Module._compiled_call_impl")  # what module.compile() set
is_view = private("torch.Tensor._is_view")
is_zero = private("torch.Tensor._is_zerotensor")
num_users_of_tensor = private("torch.Tensor._use_count")
num_users_of_storage = private("torch._C._storage_Use_Count")
fills_its_memory = private(
    "torch._prims_common.is_non_overlapping_and_dense_or_false",
    instead="torch._prims_common.is_non_overlapping_and_dense",  # torch 2.8 and 2.9
)

# Autograd: the running backward, its node, and the hooks on saved tensors.
engine = private("torch.autograd.Variable._execution_engine")
is_plain_backward = private("torch.autograd._is_checkpoint_valid")
current_backward = private("torch._C._current_graph_task_id")
backward_keeps_graph = private("torch._C._autograd._get_current_graph_task_keep_graph")
# the innermost pair of hooks (pack, unpack), or None
hooks_in_force = partial(private("torch._C._autograd._top_saved_tensors_default_hooks"), False)
without_dispatch_key = private("torch._C._SetExcludeDispatchKeyGuard")
KEY_OF_VERSIONS = private("torch._C.DispatchKey.ADInplaceOrView")
current_node = private("torch._C._current_autograd_node")
next_node_number = private("torch.autograd._get_sequence_nr")
PythonNode = private("torch.autograd.function.BackwardCFunction")
without_torch_function = private("torch._C.DisableTorchFunction")
tracer = private("torch.fx.experimental.proxy_tensor.get_proxy_mode")
transforms_in_force = private("torch._C._functorch.peek_interpreter_stack")
# A gradient of many vectors at once (`is_grads_batched`) runs backward under vmap.
outside_vmap = partial(
    private("torch._C._ExcludeDispatchKeyGuard"),
    private("torch._C.DispatchKeySet")(private("torch._C._parse_dispatch_key")("VmapMode")),
)


def is_transformed() -> bool:
    """Tells whether a forward runs under a transform of torch: forward-mode differentiation
    (`dual_level`), `torch.func` (`grad`, `vmap`, `jvp`), or what traces it (`torch.jit.trace`,
    `make_fx`, `torch.export`).
    """
    return (
        getattr(forward_ad, "_current_level", -1) >= 0
        or transforms_in_force() is not None
        or torch.jit.is_tracing()
        or tracer() is not None
    )


# Modes on torch's functions (a default device is one), and hooks on all modules.
function_modes = private("torch.overrides._get_current_function_mode_stack")
push_function_mode = private("torch.overrides._push_mode")
pop_function_mode = private("torch.overrides._pop_mode")
hooks_of_all_modules = tuple(
    private(f"torch.nn.modules.module._global_{name}")
    for name in (
        "forward_pre_hooks",
        "forward_hooks",
        "forward_hooks_always_called",
        "forward_hooks_with_kwargs",
        "backward_pre_hooks",
        "backward_hooks",
    )
)
attention_order = private("torch._C._get_sdp_priority_order")
set_attention_order = private("torch._C._set_sdp_priority_order")


def matmul_precision() -> str:
    """Returns the precision of float32 products, or torch's default where torch raises, since the
    settings of its backends, which it has since 2.9, say something else."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return "highest"


# What reads and what sets each setting that chooses kernels. One may set those behind it.
flags_of_kernels = [(matmul_precision, torch.set_float32_matmul_precision)]
if hasattr(torch.backends, "fp32_precision"):  # torch >= 2.9
    places = product(("cuda", "mkldnn"), ("all", "conv", "rnn", "matmul"))
    read_precision = private("torch._C._get_fp32_precision_getter")
    put_precision = private("torch._C._set_fp32_precision_setter")
    flags_of_kernels += [
        (partial(read_precision, *place), partial(put_precision, *place))
        for place in [("generic", "all"), *places]
    ]
flags_of_kernels += [
    (private(f"torch._C._get_{read}"), private(f"torch._C._set_{put or read}"))
    for read, put in {
        "flash_sdp_enabled": "sdp_use_flash",
        "mem_efficient_sdp_enabled": "sdp_use_mem_efficient",
        "math_sdp_enabled": "sdp_use_math",
        "cudnn_sdp_enabled": "sdp_use_cudnn",
        "overrideable_sdp_enabled": "sdp_use_overrideable",
        "math_sdp_allow_fp16_bf16_reduction": "",
        "mkldnn_enabled": "",
        "cudnn_enabled": "",
        "cudnn_benchmark": "",
        "cudnn_deterministic": "",
    }.items()
]

# Trees of tensors, in arguments and results.
tree_flatten_with_path = private("torch.utils._pytree.tree_flatten_with_path")
tree_leaves = private("torch.utils._pytree.tree_leaves")
tree_map = private("torch.utils._pytree.tree_map")
tree_map_only = private("torch.utils._pytree.tree_map_only")
tree_unflatten = private("torch.utils._pytree.tree_unflatten")
tree_path_text = private("torch.utils._pytree.keystr")

# Operators: the schema of one, and those that take lists of tensors.
schema_of = attribute("torch.ops.aten.relu.default._schema")
OpOverload = private("torch._ops.OpOverload")
foreach_copy_ = private("torch._foreach_copy_")
foreach_mul_ = private("torch._foreach_mul_")
foreach_norm = private("torch._foreach_norm")

# The compiler. `disable_dynamo` keeps it out of a function; the public one imports all of dynamo.
disable_dynamo = private("torch._compile._disable_dynamo", instead="torch.compiler.disable")


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function so that a compiler that is in use does not trace it. A `def`, no method.

    It would trace hooks that operators in an uncompiled part call, and make their objects twice.
    """
    return disable_dynamo(function) if "torch._dynamo" in sys.modules else function


# These are functions: the modules of such a name load slowly, and few runs need them.
inductor_compile = partial(private, "torch._inductor.compile")
inductor_settings = partial(private, "torch._inductor.config")
compiler_settings = partial(private, "torch._functorch.config")

# Tensors and ranks without memory and processes.
FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor")
FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode")
NeedsValues = private("torch._subclasses.fake_tensor.DataDependentOutputException")
NeedsSizes = private("torch._subclasses.fake_tensor.DynamicOutputShapeException")
fake_mode_of = operator.attrgetter("fake_mode")  # of such a tensor
fake_work = private("torch._C._distributed_c10d.FakeWork")
has_kernel_for = private("torch._C._dispatch_has_kernel_for_dispatch_key")
fake_store = partial(private, "torch.testing._internal.distributed.fake_pg.FakeStore")

# The place of a tensor in a file of torch.distributed.checkpoint.
storage_info = partial(private, "torch.distributed.checkpoint.filesystem._StorageInfo")

# The history of the memory of a GPU.
record_memory_history = private("torch.cuda.memory._record_memory_history")
write_memory_history = private("torch.cuda.memory._dump_snapshot")


def is_fake(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor is one of FakeTensorMode: it has a shape and no values."""
    return isinstance(tensor, FakeTensor)


def has_values(value: Any) -> bool:
    """Tells whether a tensor or an array has values that can be copied and compared.

    A tensor on the meta device and a fake tensor have none.
    """
    return not isinstance(value, torch.Tensor) or (
        value.device.type != "meta" and not is_fake(value)
    )


def forget_workers(loader: Any) -> None:
    """Makes a loader whose workers persist begin as a new one does, which draws a seed for them."""
    loader._iterator = None
