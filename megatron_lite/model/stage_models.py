"""The stages of the model that one pipeline rank holds, as one module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from megatron_lite.model.gpt import GPTModel


class ModelStages(nn.Module):
    """The model chunks of one pipeline rank, in the order of the model: one for each of its stages.

    Parameters have the names of the whole model. No two stages of a rank share a name.
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def __iter__(self) -> Iterator[GPTModel]:
        return iter(self.chunks)  # type: ignore[arg-type]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in self.chunks:
            yield from chunk.named_parameters(prefix, recurse, remove_duplicate)

    def constants(self) -> tuple[Tensor, ...]:
        """Returns the tensors besides the parameters that outlive a step."""
        return tuple(tensor for chunk in self for tensor in chunk.constants())
