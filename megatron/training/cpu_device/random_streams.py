"""Two random streams, host and device, over the one generator that CPU operators draw from.

On a GPU, dropout and initialisation draw from the device's generator and data loading draws from
the host's. Megatron relies on the difference: tensor-parallel peers must keep equal device
streams although only the first of them loads data. CPU operators all draw from torch's default
generator, so that one *is* the device stream, and the host's stream is kept beside it and put in
its place while a ``DataLoader`` works (:func:`host_stream`).

``torch.cuda.get_rng_state`` is the device stream, ``torch.get_rng_state`` the host's, and each
round-trips alone, as in a checkpoint. Plain CPU code (draw, restore, draw again) draws from the
device stream too, so a host state remembers the device state of its moment as long as the tensor
lives, and ``torch.set_rng_state`` brings both back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .redirect import redirect

_DEVICE_STATE_BYTES = 16
"""Size of a real CUDA generator's state: a seed and an offset."""

_parked = torch.Generator()
"""Holds the stream that does not draw at present."""

_host_is_active = False
_device_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Host state -> the device state of the same moment."""


def _host() -> torch.Generator:
    """Return the generator that holds the host stream now."""
    return torch.default_generator if _host_is_active else _parked


def _device() -> torch.Generator:
    """Return the generator that holds the device stream now."""
    return _parked if _host_is_active else torch.default_generator


def _swap() -> None:
    """Exchange the states of the default generator and of the parked one."""
    active, parked = torch.default_generator.get_state(), _parked.get_state()
    torch.default_generator.set_state(parked)
    _parked.set_state(active)


@contextmanager
def host_stream() -> Iterator[None]:
    """Let draws come from the host stream inside the ``with``; nesting is harmless."""
    global _host_is_active
    if _host_is_active:
        yield
        return
    _swap()
    _host_is_active = True
    try:
        yield
    finally:
        _host_is_active = False
        _swap()


class _HostGenerator:
    """What ``torch.manual_seed`` and ``torch.get_rng_state`` act on."""

    device = torch.device("cpu")

    def get_state(self) -> torch.Tensor:
        """Return the state of the host stream, which remembers the device's."""
        state = _host().get_state()
        _device_states[state] = _device().get_state()
        return state

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Restore the host stream and, of the same moment if known, the device stream."""
        _host().set_state(state)
        _device().set_state(_device_states.get(state, state))
        return torch.default_generator

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed both streams, as ``torch.manual_seed`` seeds all devices."""
        _parked.manual_seed(seed)
        return torch.default_generator.manual_seed(seed)

    def seed(self) -> int:
        """Seed both streams with one number from the system and return it."""
        number = torch.default_generator.seed()
        _parked.manual_seed(number)
        return number

    def initial_seed(self) -> int:
        """Return the seed that the host stream started from."""
        return _host().initial_seed()


class _DeviceGenerator:
    """What the CUDA random API and Megatron's RNG tracker act on."""

    device = torch.device("cpu")

    def get_state(self) -> torch.Tensor:
        """Return the state of the device stream."""
        return _device().get_state()

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Restore the device stream; a GPU's state can only seed it, which is said."""
        if state.numel() != _DEVICE_STATE_BYTES:
            return _device().set_state(state)
        warnings.warn(
            "a random state saved on a GPU cannot be continued on the CPU; "
            "the CPU stream is seeded from it",
            stacklevel=2,
        )
        seed, offset = state.cpu().contiguous().view(torch.int64).tolist()
        return _device().manual_seed((seed * 1_000_003 + offset) % 2**63)

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed the device stream."""
        return _device().manual_seed(seed)

    def seed(self) -> int:
        """Seed the device stream with a number from the system and return it."""
        return _device().seed()

    def initial_seed(self) -> int:
        """Return the seed that the device stream started from."""
        return _device().initial_seed()


class _DeviceGenerators(Sequence):
    """``torch.cuda.default_generators``: every index is the one device stream."""

    def __init__(self) -> None:
        self._generator = _DeviceGenerator()

    def __len__(self) -> int:
        """Return the number of devices."""
        return torch.cuda.device_count()

    def __getitem__(self, index: int) -> _DeviceGenerator:
        """Return the device stream, or end an iteration over the devices."""
        if index >= len(self):
            raise IndexError(f"device index {index} of {len(self)}")
        return self._generator


def redirect_random() -> None:
    """Redirect both random APIs where they look their generator up.

    ``torch.random`` and ``torch.cuda.random`` find their generator through a module attribute at
    every call, so functions that were imported by name earlier follow too.
    """
    _parked.set_state(torch.default_generator.get_state())
    redirect(
        torch.random,
        "default_generator",
        _HostGenerator(),
        to="the host stream",
        why="torch.manual_seed, seed, get_rng_state, set_rng_state and fork_rng use it",
    )
    redirect(
        torch.cuda,
        "default_generators",
        _DeviceGenerators(),
        to="the device stream",
        why="torch.cuda.manual_seed, get_rng_state, set_rng_state and Megatron's tracker use it",
    )
