"""`deepspeed.runtime.sparse_tensor`: the rows of a matrix that are not all zero."""

from __future__ import annotations

import torch


class SparseTensor:
    """Rows by their numbers; a row may be there more than once, and its values are added."""

    def __init__(self, dense_tensor: torch.Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        self.is_sparse, self.dtype, self.dense_size = dense_tensor.is_sparse, dense_tensor.dtype, [*dense_tensor.shape]
        if dense_tensor.is_sparse:
            kept = dense_tensor.coalesce()
            self.indices, self.values = kept.indices().flatten(), kept.values()
        else:
            self.indices = dense_tensor.any(1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    @staticmethod
    def type() -> str:
        return "deepspeed.SparseTensor"

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        assert self.indices is not None and self.values is not None and self.dense_size is not None, (
            "SparseTensor: it was made of nothing; set indices, values and dense_size first"
        )
        return self.indices, self.values, self.dense_size

    def to_coo_tensor(self) -> torch.Tensor:
        indices, values, size = self._parts()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size, check_invariants=False)

    def to_dense(self) -> torch.Tensor:
        indices, values, size = self._parts()
        return values.new_zeros(size).index_add_(0, indices, values)

    def sparse_size(self) -> tuple[int, int]:
        """Elements that are kept, with the numbers of rows; and those of the matrix."""
        indices, values, size = self._parts()
        return indices.numel() + values.numel(), size[0] * size[1]

    def add(self, b: SparseTensor) -> None:
        indices, values, size = self._parts()
        others, other_values, other_size = b._parts()
        assert size == other_size, f"SparseTensor.add: the sizes are {size} and {other_size}"
        self.indices, self.values = torch.cat([indices, others]), torch.cat([values, other_values])
