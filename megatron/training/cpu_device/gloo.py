"""Collectives that NCCL has and gloo lacks, composed of those that gloo has.

Probed with torch 2.11: gloo does sums, extrema and averages of every floating type, in-place
``reduce_scatter_tensor`` and ``all_gather_into_tensor`` (coalesced too), empty tensors and uneven
``all_to_all_single``. What it lacks is here; each function runs on all ranks of its group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .redirect import redirect

_ProcessGroup = torch._C._distributed_c10d.ProcessGroup
_Options = torch._C._distributed_c10d


class _Together:
    """Several handles as one: done when all are."""

    def __init__(self, handles: list[Any], after: Callable[[], None] | None = None) -> None:
        self._handles = handles
        self._after = after

    def wait(self, timeout: Any = None) -> bool:
        """Wait for every handle, then finish the output once."""
        for handle in self._handles:
            handle.wait()
        if self._after is not None:
            self._after()
            self._after = None
        self._handles = []
        return True

    def is_completed(self) -> bool:
        """Return whether every handle is done."""
        return all(handle.is_completed() for handle in self._handles)

    def block_current_stream(self) -> None:
        """Wait, for there is no stream to queue the wait on."""
        self.wait()


def _is_gloo(group: Any) -> bool:
    """Return whether ``group`` runs over gloo (a fake or MPI group is left alone)."""
    return group.name() == "gloo"


def _all_to_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the all-to-all of tensor lists: one flat all-to-all, then copies."""

    @functools.wraps(function)
    def alltoall(group: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Exchange ``inputs[i]`` with rank i of the group; shapes may differ by pair."""
        if not _is_gloo(group):
            return function(group, outputs, inputs, *args, **kwargs)
        sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
        sizes = [tensor.numel() for tensor in outputs]
        received = sent.new_empty(sum(sizes))
        handle = group.alltoall_base(
            received, sent, sizes, [tensor.numel() for tensor in inputs], _Options.AllToAllOptions()
        )

        def unpack() -> None:
            """Copy the pieces to the caller's tensors."""
            for output, piece in zip(outputs, received.split(sizes), strict=True):
                output.copy_(piece.view(output.shape))

        return _Together([handle], unpack)

    return alltoall


def _split_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the flat all-to-all: split sizes may be a CPU tensor.

    Megatron's token dispatcher turns sizes that are on the device into lists; on the CPU it takes
    them to be there already.
    """

    @functools.wraps(function)
    def alltoall_base(group: Any, output: Any, given: Any, *sizes: Any, **kwargs: Any) -> Any:
        """Exchange slices of the first dimension over the group."""
        lists = [size.tolist() if isinstance(size, torch.Tensor) else size for size in sizes]
        return function(group, output, given, *lists, **kwargs)

    return alltoall_base


def _all_gather(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the all-gather of tensor lists: unequal shapes become one broadcast per rank."""

    @functools.wraps(function)
    def allgather(group: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather every rank's tensor; all ranks agree on the shapes, so all take one path."""
        pieces = outputs[0] if outputs and isinstance(outputs[0], list) else outputs
        uneven = isinstance(pieces, list) and len({tuple(piece.shape) for piece in pieces}) > 1
        if not uneven or not _is_gloo(group):
            return function(group, outputs, inputs, *args, **kwargs)
        mine = inputs[0] if isinstance(inputs, list) else inputs
        pieces[group.rank()].copy_(mine)
        handles = []
        for root, piece in enumerate(pieces):
            options = _Options.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            handles.append(group.broadcast([piece], options))
        return _Together(handles)

    return allgather


def _all_reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap all-reduce: gloo cannot scale before it sums."""

    @functools.wraps(function)
    def allreduce(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce in place over the group."""
        options = args[0] if args else kwargs.get("opts")
        operation = getattr(options, "reduceOp", None)
        if operation == dist.ReduceOp.PREMUL_SUM and _is_gloo(group):
            raise ValueError(
                "a pre-multiplied sum (NCCL's) cannot run over gloo: scale the tensor first"
            )
        return function(group, tensors, *args, **kwargs)

    return allreduce


def _byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as bytes where gloo does not know its type (8-bit floats, int16)."""
    unknown = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if unknown or tensor.dtype is torch.int16 else tensor


def _moving_bytes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective that only moves data: types that gloo does not know go as bytes."""

    @functools.wraps(function)
    def move(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Move the data of a list of tensors."""
        if isinstance(tensors, list) and _is_gloo(group):
            tensors = [_byte_view(tensor) for tensor in tensors]
        return function(group, tensors, *args, **kwargs)

    return move


def redirect_gloo_gaps() -> None:
    """Mend ``ProcessGroup`` for gloo groups; other groups are left alone."""
    for name, wrap, to, why in (
        ("alltoall", _all_to_all, "one flat all_to_all", "gloo has none for lists of tensors"),
        ("alltoall_base", _split_sizes, "sizes as lists", "the token dispatcher passes tensors"),
        ("allgather", _all_gather, "broadcasts if uneven", "gloo wants equal shapes"),
        ("allreduce", _all_reduce, "a clear error", "gloo has no pre-multiplied sum"),
        ("broadcast", _moving_bytes, "bytes for odd types", "gloo lacks 8-bit floats and int16"),
        ("send", _moving_bytes, "bytes for odd types", "gloo lacks 8-bit floats and int16"),
        ("recv", _moving_bytes, "bytes for odd types", "gloo lacks 8-bit floats and int16"),
    ):
        redirect(_ProcessGroup, name, wrap(getattr(_ProcessGroup, name)), to=to, why=why)
