"""Puts a recompute policy on the layers of any PyTorch model, in place.

    apply_policy_(model, layers_fqn="transformer.h", policy="every-2:full")
    remove_policy_(model)

The layers of a torch.nn.ModuleList, ModuleDict or Sequential are counted in order. Each layer keeps
its parameters and its name in the model; only its `forward` is wrapped. A model of another library
calls its layers one by one, so a unit is one layer. Named regions are refused, because only the
layers of this project have them. `docs/any-model.md` lists what is supported and what is refused.
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from megatron_lite.config.policy import check_policy_reaches, parse_policy
from megatron_lite.parallel.tensor_hash import keys_on
from megatron_lite.parallel.torch_internals import disable_dynamo, has_values, is_transformed
from megatron_lite.parallel.weights import weights_in_use

from .caches import with_own_caches
from .contents import sharded, tensors_of
from .guard import Guard, Verify
from .hooked import How, Turns, rebuild_saved
from .layer_state import Written
from .randomness import DefaultGenerators, Generators
from .recompute_plan import RecomputePlan, Segment, segments
from .saved import Args, Kwargs

if TYPE_CHECKING:
    from .offload import CopyStreams, Offload
    from .pool import Pool

MAX_FRAMES = 10  # between this module and nn.Module, which calls a forward; torch.compile adds some
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SCRIPTS = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
CALLERS = frozenset({"_call_impl", "_slow_forward"})


def apply_policy_(
    model: nn.Module,
    *,
    layers_fqn: str,
    policy: str,
    verify: Verify = "first",
    rng: Generators | None = None,
) -> RecomputePlan:
    """Wraps the layers of `model.<layers_fqn>` and returns the plan that they follow.

    config/policy.py describes the language of `policy`. Loss and gradients are bitwise those of the
    plain model. That holds for results of any kind, and for a loss that leaves a layer by an
    attribute or a hook. It also holds under autocast, DDP, `functional_call`, `torch.autograd.grad`
    and second-order gradients.

    A recomputed layer keeps for backward the tensors among its arguments, generator states, and
    copies of the buffers and arguments that it writes to. With @host everything a layer saves is
    offloaded, except tensors passed after the first one (attention masks), which layers share.

    verify: which replays are compared with their forwards. "first": the first one of each layer,
        those of its calls 2, 4, 8, 16, .., and those of calls that differ from all before in kind
        (guard.py). True: all. False: none. A difference raises RecomputeMismatch in backward.
    rng: the named random-number streams that the layers draw from. Without it, a replay restores
        torch's default generators of all devices in use.

    ValueError, before anything is changed, if
        the model has no such module, or it is no ModuleList, ModuleDict or Sequential, or is empty;
        the policy cannot be parsed, or one of its rules never applies;
        the policy names regions, units of several layers, or operators that torch does not have;
        it says @split, and no weight of the layer is divided over tensor-parallel ranks;
        the layers have a policy already.
    RuntimeError in forward or backward: the message names what a replay cannot repeat.
    It warns of a rule that names more layers than the model has, and once of a key-value cache that
    recomputed layers do not fill.
    """
    layers = layers_of(model, layers_fqn)
    setting = f"policy for {layers_fqn}"
    parsed = parse_policy(policy, setting=setting)
    notices = check_policy_reaches(parsed, [len(layers)], setting=setting)
    plan = RecomputePlan(tuple(segments(parsed, len(layers))), skip_tail=False, verify=bool(verify))
    for segment, layer in zip(plan.segments, layers, strict=False):
        _check(segment, layer, setting)
    if any(_policies(layer) for layer in layers):
        raise ValueError(
            f"the layers of {layers_fqn} have a recompute policy already: take it off with "
            "remove_policy_(model)"
        )
    for notice in notices:
        warnings.warn(notice, stacklevel=2)
    for layer in layers if verify else ():
        for each in filter(has_values, layer.parameters()):
            keys_on(each.device)  # which hashes keep
    shared = _Shared(plan, rng)
    for segment, layer in zip(plan.segments, layers, strict=True):
        if segment.is_whole or segment.on_host:
            layer.forward = _Recomputed(
                layer, f"{layers_fqn}.{segment.first_layer}", segment, shared, verify
            )
    return plan


def remove_policy_(model: nn.Module) -> int:
    """Removes every recompute policy from the model and the modules inside it.

    Returns the number of layers that had one; with 0 nothing has changed. Graphs of earlier
    forwards can still be used.
    """
    wrapped = [module for module in model.modules() if _policies(module)]
    for module in wrapped:
        # A layer that stands twice in a list has two policies.
        for policy in _policies(module):
            policy.take_off(module)
    return len(wrapped)


def saved_forms(layer: nn.Module) -> list[Any]:
    """Returns the forms of all that a layer with a policy has saved in its last call."""
    return [form for policy in _policies(layer) for form in policy._guards[True].forms]


def _policies(module: nn.Module) -> list[_Recomputed]:
    """Returns the policies of a module, outermost first.

    Other libraries (accelerate) wrap the forward that they find, or keep it as another attribute.
    """
    found = [value for value in vars(module).values() if isinstance(value, _Recomputed)]
    forward = vars(module).get("forward")
    while forward is not None:
        if isinstance(forward, _Recomputed):
            found.append(forward)
        forward = getattr(forward, "__wrapped__", None)
    return [policy for policy in dict.fromkeys(found) if not policy._is_off]


class _Recomputed:
    """A layer's forward that keeps for backward what its segment of the plan allows.

    It can be copied and pickled with its model.
    """

    def __init__(
        self, layer: nn.Module, name: str, segment: Segment, shared: _Shared, verify: Verify
    ) -> None:
        self._layer = layer
        self._name = name
        self._segment = segment
        self._shared = shared
        # By whether the arguments have values: without them (fake, or on the meta device) a call
        # shows neither what the layer writes to, nor that it repeats itself.
        self._guards = {True: Guard(verify), False: Guard(False, stops_early=False)}
        # another library's wrapper; None for the method of the class, which a traced module lacks
        is_script = isinstance(layer, torch.jit.ScriptModule)
        self._before: Any = layer.forward if is_script else layer.__dict__.get("forward")
        self._written = Written()
        self._compared: dict[Any, bool] = {}  # see split_inputs.py
        self._is_off, self._is_new = False, True
        self._references = 0

    @property
    def __globals__(self) -> Any:
        """What a compiler of source code asks for first."""
        raise AttributeError(
            f"{self._name} has a recompute policy, which TorchScript cannot compile: call "
            "remove_policy_(model) first"
        )

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward of the layer without this policy."""
        return self._forward_of(self._layer)

    def _forward_of(self, layer: nn.Module) -> Callable[..., Any]:
        if self._before is None:
            found = inspect.getattr_static(type(layer), "forward")
            return found.__get__(layer, type(layer)) if hasattr(found, "__get__") else found
        is_method = getattr(self._before, "__self__", None) is self._layer
        return self._before.__func__.__get__(layer) if is_method else self._before

    def take_off(self, layer: nn.Module) -> None:
        """Puts the layer's own forward back, wherever another library may have put this one."""
        self._is_off = True  # what wrapped it goes on calling it
        held = vars(layer)
        for name in [name for name, value in held.items() if value is self]:
            if name == "forward" and self._before is None:
                del held[name]
            else:
                held[name] = self._forward_of(layer)

    def _called(self) -> nn.Module:
        """Returns the module that is called: a copy of the layer may share this forward.

        copy.copy and DataParallel copy the attributes of a module, this one among them. nn.Module
        calls it without the module, which only the frame of the caller has.
        """
        frame = sys._getframe(1)
        for _ in range(MAX_FRAMES):
            if not frame.f_back:
                break
            frame = frame.f_back
            module = frame.f_locals.get("self") if frame.f_code.co_name in CALLERS else None
            if isinstance(module, nn.Module) and vars(module).get("forward") is self:
                return module
        self._check_unshared()
        return self._layer

    def _check_unshared(self) -> None:
        """RuntimeError: a copy of the layer has this forward as well, and a call of `.forward` does
        not tell for which of them it is.

        The search is slow, so it comes only when the number of references is another one.
        """
        before, self._references = self._references, sys.getrefcount(self)
        if before == self._references:
            return
        found = gc.get_referrers(self)  # Python has modules among them, or their attributes
        held = [vars(each) if isinstance(each, nn.Module) else each for each in found]
        if len({id(one) for one in held if type(one) is dict and one.get("forward") is self}) > 1:
            raise RuntimeError(
                f"{self._name}: a copy of the layer (copy.copy) shares its forward, and a call of "
                "`.forward` does not tell which of them is meant: call the module itself, or make "
                "the copy with copy.deepcopy"
            )

    # A compiler around the model cannot trace hooks and replays, so layers with a policy run
    # uncompiled. Functions that a layer compiles itself stay compiled, in the forward and the
    # replay.
    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._called()
        forward = self._forward_of(layer)
        if self._is_off or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The first call of a lazy layer makes its parameters, and that of something scripted or
        # traced its final operators. It keeps all that it saves.
        if self._is_new:
            self._is_new = any(isinstance(each, LazyModuleMixin) for each in layer.modules())
            if self._is_new or _has_script(layer):
                return forward(*args, **kwargs)
        if is_transformed():
            # Its tensors belong to the transform, and what a replay rebuilds does not.
            self._shared.notify(
                "Under a transform of torch (forward-mode jvp, torch.func, torch.jit.trace, "
                "make_fx, torch.export) layers with a recompute policy keep all that they save for "
                "backward on the device"
            )
            return forward(*args, **kwargs)
        given = tensors_of((args, kwargs))
        valued = all(map(has_values, given))
        try:
            with self._elsewhere(layer, given, valued):
                known: Any = self._written.known  # a walk through the modules takes long
                is_known = known and known.layer is layer
                given += known.parameters if is_known else layer.parameters()
                # Kernels for inference alone are not chosen under a mode. Nothing is saved here.
                if not self._segment.is_whole or not any(each.requires_grad for each in given):
                    return forward(*args, **kwargs)
                rng = self._shared.rng or DefaultGenerators({each.device for each in given})
                return self._recomputed(layer, forward, args, kwargs, rng if valued else None)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise RuntimeError(
                f"{self._name} runs torch.func.grad or its like, which torch refuses in a layer "
                "whose activations are rebuilt or moved: take the layer out of the policy"
            ) from error

    def _recomputed(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        rng: Generators | None,
    ) -> Any:
        """Runs the layer. rng: what it draws from; None if its arguments have no values."""
        forward, args, kwargs = with_own_caches(forward, args, kwargs, self._shared.notify)
        valued = rng is not None
        results = None
        if self._segment.ops:
            from .ops import KeptResults

            results = KeptResults(self._segment.ops, skip_tail=True)
        how = How(
            name=self._name,
            rng=rng,
            layer=layer,
            written=self._written if valued else Written(),
            results=results,
            guard=self._guards[valued],
            turns=self._shared.turns,
        )
        outputs = rebuild_saved(forward, args, kwargs, how)
        if layer is not self._layer:  # a copy, which need not live on here
            self._written.known = None
        self._shared.note_router(self._segment, bool(how.guard.has_router))
        return outputs

    def _elsewhere(
        self, layer: nn.Module, given: list[Tensor], valued: bool
    ) -> AbstractContextManager[None]:
        """Returns the block in which `@split` and `@host` keep what is given to the layer."""
        # The first tensor is the hidden states, which belong to this layer. All others stay.
        if self._segment.split:
            from .split_inputs import dividing

            return dividing(layer, given[0], self._compared)
        if not self._segment.on_host or not valued:
            return nullcontext()  # the pool's buffers outlive a mode of fake tensors
        device = given[0].device if given else torch.device("cpu")
        return self._shared.offloaded(
            self._segment.first_layer, device, stay=[*weights_in_use(layer), *given[1:]]
        )


def _has_script(layer: nn.Module) -> bool:
    """Tells whether a layer has scripted or traced parts, or its forwards name such functions."""
    for module in layer.modules():
        function = inspect.unwrap(getattr(type(module), "forward", None))  # type: ignore[arg-type]
        named = inspect.getclosurevars(function)[:2] if inspect.isfunction(function) else ()
        held = [each for place in (vars(module), *named) for each in place.values()]
        if any(isinstance(each, SCRIPTS) for each in (module, *held)):
            return True
    return False


class _Shared:
    """The host memory, streams and warnings that the layers under one policy share.

    plan: of these layers, in the order of their calls.
    rng: the named random-number streams that the layers draw from, if any. Without them, they draw
        from torch's default generators of the devices of their arguments and parameters.
    """

    def __init__(self, plan: RecomputePlan, rng: Generators | None) -> None:
        self.rng, self._without_router = rng, [each for each in plan.segments if each.router]
        self._host_layers = [each.first_layer for each in plan.segments if each.on_host]
        self._memory: tuple[Pool, CopyStreams] | None = None
        self._offloads: dict[int, Offload] = {}  # by thread: DataParallel has several
        self._notified: set[str] = set()
        self.turns = Turns()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out host memory and streams, which belong to a process; a copy makes its own."""
        return {**self.__dict__, "_memory": None, "_offloads": {}}

    def notify(self, text: str) -> None:
        """Warns with `text`, but only the first time."""
        if text not in self._notified:
            self._notified.add(text)
            warnings.warn(text, stacklevel=2)

    def note_router(self, segment: Segment, has_router: bool) -> None:
        """Warns if the last layer whose policy says +router has run, and none of them has one."""
        if has_router:
            self._without_router = []
        elif segment in self._without_router[-1:]:
            self.notify("No layer whose policy says +router calls top-k: no choice is kept")

    @contextmanager
    def offloaded(self, layer: int, device: torch.device, *, stay: list[Tensor]) -> Iterator[None]:
        """Offloads the tensors that a layer saves inside the block. stay: tensors not moved."""
        # Imported late, as ops.py is: most policies move nothing and keep no results.
        from .offload import Offload, copy_streams_of
        from .pool import Pool

        if not self._memory:
            self._memory = Pool(pinned=device.type == "cuda"), copy_streams_of(device)
        pool, copy_streams = self._memory
        # One Offload serves one forward of the model, in which each layer frees the originals of
        # the layer before. So the first layer with @host starts it and the last one finishes it.
        offload = self._offloads.pop(thread := get_ident(), None)
        if not offload or layer == self._host_layers[0]:
            offload = Offload(copy_streams, kind=device.type)
        with offload.segment(pool, stay=stay):
            yield
        if layer == self._host_layers[-1]:
            offload.finish()
        else:
            self._offloads[thread] = offload


def layers_of(model: nn.Module, layers_fqn: str) -> list[nn.Module]:
    """Returns the layers of the list of modules that has this name.

    Raises ValueError if the model has no such list.
    """
    found: Any = dict(model.named_modules(remove_duplicate=False)).get(
        str(layers_fqn)  # a list has no hash
    )
    is_list = isinstance(found, LISTS)
    layers = _callable(found) if is_list else []
    if not layers:
        kind = f"a {type(found).__name__}" + " without a module that can be called" * is_list
        outermost: list[str] = []  # and those inside a root that is one
        for name in lists_in(model):
            if not any(name.startswith(f"{one}.") for one in outermost):
                outermost.append(name or "'' (the model itself)")
        raise ValueError(
            f"layers_fqn {layers_fqn!r} is {'no module of the model' if found is None else kind}: "
            "a policy needs a ModuleList, a ModuleDict or a Sequential of layers; its lists of "
            f"modules are {', '.join(outermost) or 'none'}"
        )
    return [*map(_unwrapped, layers)]


def lists_in(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the modules that can be called of each list in a model, by the name of the list.

    A list of lists has none, and is left out.
    """
    lists = ((name, each) for name, each in model.named_modules() if isinstance(each, LISTS))
    return {name: found for name, each in lists if (found := _callable(each))}


def _callable(modules: nn.Module) -> list[nn.Module]:
    """Returns the modules of a list that have a forward."""
    return [
        one
        for one in modules._modules.values()
        if one is not None and getattr(one.forward, "__func__", None) is not nn.Module.forward
    ]


def _unwrapped(layer: nn.Module) -> nn.Module:
    """Returns the layer inside of FSDP1's wrapper, which a replay must not run a second time.

    ValueError: the wrapper is around a part of the layer.
    """
    kind = "FullyShardedDataParallel"
    inside: Any = layer.module if layer in sharded(layer, kind) else layer
    if sharded(inside, kind):
        raise ValueError(
            f"{kind} is around a part of a layer, which a replay in backward "
            "cannot call: wrap whole layers, or use fully_shard (FSDP2)"
        )
    return inside


def _check(segment: Segment, layer: nn.Module, setting: str) -> None:
    refused = {
        f"{'+'.join(sorted(segment.rebuilt))} names regions, and this model's layers have none: "
        "use full, none or ops(...)": segment.rebuilt,
        "the model calls its layers one by one, so a unit cannot have "
        f"{segment.num_layers}: use full": segment.num_layers > 1,
        f"@{segment.store} names parts of this project's own layers: give @host": (
            segment.host_modules
        ),
        "a model of another library has @split or @host, not both": (
            segment.split and segment.on_host
        ),
    }
    for reason, is_so in refused.items():
        if is_so:
            raise ValueError(f"{setting}, layer {segment.first_layer}: {reason}")
    if segment.split:
        from .split_inputs import NO_GROUP, tensor_parallel_group

        if not tensor_parallel_group(layer):
            raise ValueError(f"{setting}, layer {segment.first_layer}: {NO_GROUP}")
    if segment.ops:
        from .ops import find_operators

        find_operators(segment.ops, setting=setting)
