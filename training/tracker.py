"""Count the bytes of live tensors: of a real run, or of one whose floating-point tensors hold no numbers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

aten = torch.ops.aten
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put)


class Tracker(TorchDispatchMode):
    """Follow every storage that an operation returns until it is freed.

    Args:
        shares: by label, the part of its bytes that counts (default: 1).

    Attributes:
        label: the label of storages that appear from now on.
        live: bytes by label.
        peak: `live` when its total was largest since `restart`.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Accelerate's
        self.shares = shares or {}
        self.label = "activations"
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._held: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls with tensors that hold no numbers
            return torch.device("cpu")
        result = self.run(func, args, kwargs or {})
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._held:
                self.relabel([tensor], self.label)
        return result

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        return func(*args, **kwargs)

    def total(self, sizes: Mapping[str, int]) -> int:
        """Sum bytes by label."""
        return int(sum(size * self.shares.get(label, 1) for label, size in sizes.items()))

    def restart(self, label: str) -> None:
        """Forget the peak; storages that appear from now on have this label."""
        self.label, self.peak = label, self.live.copy()

    def relabel(self, tensors: Iterable[Tensor], label: str, size: int | None = None) -> None:
        """Set the label of tensors, and their bytes if these are not what they seem."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key = storage._cdata
            if key in self._held:
                self._drop(key)
            else:
                weakref.finalize(storage, self._drop, key)
            self._held[key] = label, storage.nbytes() if size is None else size
            self.live[label] += self._held[key][1]
        if self.total(self.live) > self.total(self.peak):
            self.peak = self.live.copy()

    def rename(self, old: str, new: str) -> None:
        """Give everything that has one label another one."""
        self._held = {key: (new if label == old else label, size) for key, (label, size) in self._held.items()}
        self.live[new] += self.live.pop(old, 0)

    def _drop(self, key: int) -> None:
        label, size = self._held.pop(key)
        self.live[label] -= size


class FakeTracker(Tracker):
    """Run code without computing: floating-point tensors have shapes only, all others hold numbers.

    So code that asks integers how to go on (positions, masks, places in a memory) runs as it is. Where numbers would
    decide, they are made up: searches find all entries in turn, comparisons hold, everything is finite.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        super().__init__(shares)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation; it has numbers only if no floating-point tensor without them takes part."""
        kind = func.overloadpacket
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if kind is aten._local_scalar_dense and fakes:
            return 1.0
        if kind in INDEXING and fakes:  # a mask's size depends on its numbers
            places = [
                place
                for index in args[1]
                for place in (index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else [index])
            ]
            args = args[0], places, *args[2:]
        if tensors and not fakes:
            return func(*args, **kwargs)
        result = self.mode.__torch_dispatch__(func, (), args, kwargs)  # to enter the mode would take twice the time
        return tree_map_only(
            FakeTensor,
            lambda fake: fake if fake.is_floating_point() else made_up(kind, func, args, kwargs, fake, fakes),
            result,
        )


def made_up(kind: Any, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor, fakes: list[Any]) -> Tensor:
    """Return integers or truth values for an operation's `result` that holds none."""
    name = kind.__name__
    if not fakes:
        return func(*args, **kwargs)
    if name.startswith("new_"):
        return func(torch.empty(0), *args[1:], **kwargs)
    if name.endswith("_like"):
        return func(torch.empty(result.shape), *args[1:], **kwargs)
    if result.dtype == torch.bool:  # of two tensors no numbers are equal, but each number is equal to itself
        itself = len(args) > 1 and args[0] is args[1]
        return torch.full(result.shape, (name in ("eq", "isnan", "isinf")) == itself)
    if name == "topk":
        return (torch.arange(result.numel()) % fakes[0].shape[args[2] if len(args) > 2 else -1]).view(result.shape)
    return torch.zeros(result.shape, dtype=result.dtype)
