"""``DataLoader``: host memory is not pinned, and its draws come from the host's random stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .random_streams import host_stream
from .redirect import redirect


def _unpinned(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DataLoader.__init__``: batches are not pinned."""

    @functools.wraps(function)
    def init(self: DataLoader, *args: Any, **kwargs: Any) -> None:
        """Construct, then drop pinning, whichever way it was asked for."""
        function(self, *args, **kwargs)
        self.pin_memory = False

    return init


def _in_host_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step of data loading: random draws come from the host stream."""

    @functools.wraps(function)
    def drawn(self: Any) -> Any:
        """Run the step in the host stream."""
        with host_stream():
            return function(self)

    return drawn


def redirect_data_loading() -> None:
    """Redirect ``DataLoader`` construction, iteration start and each batch."""
    why = "there is no device to copy to"
    init = _unpinned(DataLoader.__init__)
    redirect(DataLoader, "__init__", init, to="pin_memory off", why=why)
    why = "tensor-parallel peers keep equal device streams although one of them loads data"
    for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
        drawn = _in_host_stream(getattr(owner, name))
        redirect(owner, name, drawn, to="draws from the host stream", why=why)
