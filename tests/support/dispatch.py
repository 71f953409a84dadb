"""A dispatch mode that looks at each operator of a block."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatches(TorchDispatchMode):
    """Calls `saw` after each operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.saw(func, args, kwargs, results)
        return results

    def saw(self, func, args, kwargs, results):
        """Does nothing, unless a subclass does."""


def tensors_in(tree):
    """Returns the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
