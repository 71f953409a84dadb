"""The search for the fastest policy that fits a memory budget, and its result.

measurement.py measures single layers, plans.py chooses an action for each layer, and a real step
confirms the choice. If its peak is above the budget, a smaller plan is tried, and a faster one if
it is far below the prediction.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from megatron_lite.config.units import parse_bytes, size
from megatron_lite.parallel.torch_internals import compiled_call_of
from megatron_lite.recompute.apply import remove_policy_

from .layers import layer_lists
from .measurement import Measurement
from .plans import ENDLESS, Plan, fastest, neighbours, smallest
from .ranks import OtherShapes, all_ranks
from .step import COMPILED, unchanged, without_layerdrop

TRIES = 5  # of plans that may turn out to be above the budget, or far below what was predicted
TOLERANCE = 0.01  # by which a prediction may be too high
FAR = 0.1  # by how much so high a prediction is doubtful
MOST_SAMPLES = 1 << 20  # of a micro-batch


class UnreachableError(ValueError):
    """No policy fits the budget."""


@dataclass
class Fit:
    """A policy that is on a model, and the peak of a step with it. `print(fit)` describes it.

    policies: the policy of each list of layers, by its name in the model.
    budget: the bytes that a step may take; None if there is no budget.
    measured: the peak of a real step, on the rank with the highest one. plan.peak is predicted.
    plan: what the policies do, layer by layer.
    plain: the plan in which all layers keep everything.
    faster: the faster plan for the fewest bytes more. smaller: the fastest that needs fewer bytes.
    batch: the micro-batch, if the largest one was asked for.
    notes: what a reader should know of the figures.
    """

    model: nn.Module
    policies: dict[str, str]
    budget: int | None
    measured: int
    plan: Plan
    plain: Plan
    faster: Plan | None
    smaller: Plan | None
    notes: list[str]
    batch: int | None = None

    def remove(self) -> None:
        """Takes the policy off the model."""
        remove_policy_(self.model)

    def __str__(self) -> str:
        fits = f"fits {size(self.budget)}" if self.budget else "no budget"
        batch = f" with a micro-batch of {self.batch}" if self.batch else ""
        off = self.plan.peak / self.measured - 1
        lines = [
            f"{fits}{batch}: a step takes {size(self.measured)} "
            f"({size(self.plan.peak)} predicted, {off:+.2%})",
            *(f"policy of {name or 'the model'}: {text}" for name, text in self.policies.items()),
            f"price: {self.price(self.plan)}, estimated from single layers",
        ]
        for word, plan in (("faster", self.faster), ("smaller", self.smaller)):
            if plan:
                lines.append(f"next {word} plan: {size(plan.peak)}, {self.price(plan)}")
        return "\n".join([*lines, *self.notes])

    def price(self, plan: Plan) -> str:
        """Returns the time of a plan as a text."""
        longer = plan.nanoseconds / max(self.plain.nanoseconds, 1) - 1
        return f"{longer:+.1%} against a step that keeps everything"


def confirmed_fit(
    model: nn.Module,
    budget: str | None,
    step: Callable[..., Any],
    optimizer: Any,
    layers_fqn: str | Sequence[str] | None,
    maximize: str | None,
) -> Fit:
    """Does what `fit_memory_` promises. All ranks call it."""

    def checked() -> tuple[int | None, dict[str, list[nn.Module]]]:
        limit = None
        if budget is not None:
            limit = parse_bytes("budget", budget, least=1, needs_unit=True)
        if maximize not in (None, "batch") or (maximize and not limit):
            raise ValueError(f"maximize {maximize!r}: give 'batch' and a budget, or leave it out")
        _check_step(step, takes_batch=bool(maximize))
        check_model(model)
        return limit, layer_lists(model, layers_fqn)

    with all_ranks() as ranks:
        limit, lists = ranks.agreed(checked)
        every = ranks.told(limit)  # may be read from what is free on each device
        if None in every and any(every):
            raise ValueError(f"budgets {every} of the ranks: give each rank a budget, or none")
        limit = limit and min(every)
        with unchanged(model), without_layerdrop(model) as notes:
            measured = partial(Measurement, model, lists, optimizer=optimizer, ranks=ranks)
            if maximize and limit:
                fit = _largest_batch(lambda batch: measured(lambda: step(batch)), limit)
            else:
                fit = fitted(measured(step), limit)
            return replace(fit, notes=notes + fit.notes)


def _check_step(step: Any, *, takes_batch: bool) -> None:
    try:
        inspect.signature(step).bind(*[1] * takes_batch)
    except TypeError as error:
        kind = "of the micro-batch's size" if takes_batch else "without arguments"
        raise ValueError(
            f"step: {error}: give a function {kind} that runs a forward and its backward"
        ) from error
    except ValueError:  # code of C has no signature
        pass


def check_model(model: nn.Module) -> None:
    """Raises ValueError if a model is no module, is not on one CPU or GPU whose bytes can be read,
    is lazy or compiled, or rebuilds activations already."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}: give a torch.nn.Module")
    devices = {each.device for each in model.parameters()}
    if len(devices) != 1 or not {each.type for each in devices} <= {"cpu", "cuda"}:
        names = ", ".join(map(str, devices)) or "none"
        raise ValueError(f"the model must lie on one GPU of CUDA, or a CPU (got {names}): move it")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or compiled_call_of(module):
            raise ValueError(COMPILED.format(name or "the model"))
        if isinstance(module, LazyModuleMixin):
            raise ValueError(
                f"{name or 'the model'} is lazy: run the model once, which makes its weights"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{name or 'the model'} has gradient_checkpointing on, which rebuilds the layers "
                "already: call model.activation_checkpointing_disable(), in older transformers "
                "gradient_checkpointing_disable()"
            )


def fitted(measured: Measurement, budget: int | None) -> Fit:
    """Puts the fastest plan that fits on the model, once a step has confirmed it.

    Raises UnreachableError if none fits.
    """
    while True:
        with suppress(OtherShapes):
            return _fitted(measured, budget)
        measured.measure()


def _fitted(measured: Measurement, budget: int | None) -> Fit:
    problem = measured.problem
    plain = problem.plan([options[0] for options in problem.options])
    limit = budget or ENDLESS
    best = None
    for tries_left in reversed(range(TRIES)):
        found = fastest(problem, limit) if budget else plain
        is_last = not found or (tries_left == 0 and not best)
        other = found if found and not is_last else smallest(problem)
        if best and other.nanoseconds >= best.nanoseconds:
            break
        plan = other
        try:
            policies, peak = measured.confirmed(plan)
        except torch.OutOfMemoryError:
            if best:
                break
            if is_last or not budget:
                raise
            measured.notes.append(
                f"note: the device has no {size(plan.peak)}, so a smaller plan was tried"
            )
            limit = 9 * plan.peak // 10
            continue
        if not budget or peak <= budget:
            best = plan
            if plan.peak <= (1 + TOLERANCE) * peak:
                break
        elif best or is_last:
            break
        else:
            measured.notes.append(
                f"note: a plan of {size(plan.peak)} took {size(peak)}, so a smaller one was tried"
            )
        limit = plan.peak - (peak - (budget or limit))
    if not best:
        remove_policy_(measured.model)
        _, where, place = max(problem.peaks(plan.choice))
        if where.endswith(("of", "after")):
            where += f" {measured.name_of(place)}"
        rest = max(0, peak - sum(measured.terms.values()))
        terms = {**measured.terms, "activations and temporaries": rest}
        most = max(terms, key=lambda name: terms[name])
        raise UnreachableError(
            f"budget {size(budget or 0)}: no policy fits. The smallest reachable peak is "
            f"{size(peak)}, which a step confirmed, in {where}, of which {size(terms[most])} are "
            f"{most}: give a larger budget, or a step of fewer samples or tokens"
            + "".join(f"; {x}" for x in measured.notes)
        )
    if plan is not best:
        policies, peak = measured.confirmed(best)
    if budget and best.peak > max(budget, (1 + FAR) * peak):
        measured.notes.append(
            f"note: {size(best.peak)} were predicted, far more than it took. If its inputs were "
            "smaller than those before, larger ones take more than the budget"
        )
    around = neighbours(problem, best)
    return Fit(measured.model, policies, budget, peak, best, plain, *around, measured.notes)


def _largest_batch(measured: Callable[[int], Measurement], budget: int) -> Fit:
    """Returns the fit of the largest micro-batch that fits the budget."""
    fits, above = 0, MOST_SAMPLES
    while above - fits > 1:
        batch = min(2 * fits or 1, (fits + above) // 2)
        try:
            plan = fastest(measured(batch).problem, budget)
        except torch.OutOfMemoryError:
            plan = None
        if plan:
            fits = batch
        else:
            above = batch
    if fits + 1 == MOST_SAMPLES:
        raise ValueError(f"maximize 'batch': step(n) fits for every n up to {fits}: does it use n?")
    batch = max(1, fits)
    while True:
        try:
            return replace(fitted(measured(batch), budget), batch=batch)
        except UnreachableError:
            if batch == 1:
                raise
            batch -= 1
