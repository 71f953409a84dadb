"""Puts recompute policies on models that are not ours, and finds what a policy breaks.

`faults` returns an empty list if the policy breaks nothing.
"""

import re
from functools import cache

from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign import differences, train
from tests.support.foreign_families import FAMILIES, VARIANTS
from tests.support.foreign_layers import LAYERS

MODELS = {**FAMILIES, **VARIANTS, **LAYERS}
POLICIES = (
    "*:full",
    "every-2:full",
    "*:ops(matmul)",
    "*:ops(matmul,attention)",
    "0:full; *:ops(matmul/2,attention)",
    "*:ops(aten.addmm.default,aten.mm.default)",
    "*:none@host",
    "*:full@host",
    "*:ops(matmul)@host",
)
# Plain torch itself refuses it.
MUST_REFUSE = "weights written before backward"


def policy_on(foreign, text, *, verify="first"):
    """Returns a function that puts the policy on every list of layers of the model."""

    def prepare(model):
        for name in foreign.lists:
            apply_policy_(model, layers_fqn=name, policy=text, verify=verify)

    return prepare


@cache
def plain(name, situation="two micro-batches"):
    """Returns the outcome without a policy, or the reason why plain torch fails."""
    try:
        return train(MODELS[name], situation)
    except (
        RuntimeError,
        AssertionError,
    ) as reason:  # an in-place write, or a model without layers to adapt
        return str(reason)


def faults(name, text, situation="two micro-batches", *, verify="first"):
    """Returns everything that differs from the model without a policy.

    If the training ends in an error, the result is one line if the error is not allowed or not
    clear, else an empty list.
    """
    foreign, expected = MODELS[name], plain(name, situation)
    if isinstance(expected, str) and situation != MUST_REFUSE:
        return []
    try:
        found = train(foreign, situation, policy_on(foreign, text, verify=verify))
    except (ValueError, RuntimeError) as error:
        if situation == MUST_REFUSE:
            return []
        # A clear message names a layer, recomputation or the API, has no flags, and is short.
        is_clear = re.search(r"\.\d+\b|recomput|policy", message := str(error)) and (
            "--" not in message and len(message) <= 800
        )
        return [] if is_clear and foreign.may_refuse else [f"{type(error).__name__}: {message}"]
    if isinstance(expected, str):
        return ["the weights that the forward did not have were used without a word"]
    return differences(expected, found)
