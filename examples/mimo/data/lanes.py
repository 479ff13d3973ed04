"""Data lanes: which samples each data-parallel replica of each module sees.

All modules look at the same global order of samples. One microbatch step covers ``micro_batch_size *
language dp`` consecutive samples of it; each module splits them, in order, over its own replicas,
which is how the bridge between the modules splits and joins activations. The position in the order
is the number of samples consumed, so it survives any change of layout.

Data-order seeds are a namespace of their own: they depend on ``--seed`` and the epoch alone, never
on a rank or on the seeds of modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from examples.mimo.training.hetero.layout import LANGUAGE, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_ORDER_STREAM = 0x0DA7A
"""First word of the data-order seed, so that no other use of ``--seed`` repeats its numbers."""


class MultimodalDataset(Protocol):
    """Samples by index, deterministic: the same index gives the same sample at any time."""

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""

    def language(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``labels``, ``loss_mask`` and ``position_ids``, ``[sequence]``."""

    def modality(self, name: str, index: int, epoch: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the inputs of a module's encoders: encoder name to keyword to tensor."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Global order of samples over epochs.

    Attributes:
        size: samples in an epoch.
        seed: the run's ``--seed``.
        shuffle: a fresh permutation each epoch, else the dataset's own order.
    """

    size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.size < 1:
            msg = f"a dataset needs at least one sample, not {self.size}."
            raise ValueError(msg)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of one epoch."""
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([_ORDER_STREAM, self.seed, epoch]).permutation(self.size)


class LaneBatches:
    """Endless microbatches for one rank: the language lane and the lanes of hosted encoders."""

    def __init__(
        self,
        dataset: MultimodalDataset,
        order: SampleOrder,
        lanes: Sequence[Lane],
        step_size: int,
        consumed: int,
    ) -> None:
        """Start at sample ``consumed`` of the global order.

        Args:
            dataset: where samples come from.
            order: the global order.
            lanes: what this rank sees of every step.
            step_size: samples of one microbatch step over all replicas.
            consumed: samples that the run has trained on, a multiple of ``step_size``.
        """
        self._dataset = dataset
        self._order = order
        self._lanes = lanes
        self._step_size = step_size
        self._position = consumed
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return itself: the position is the state."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next microbatch of this rank."""
        batch: dict[str, Any] = {"modality_inputs": {}}
        for lane in self._lanes:
            samples = [self._locate(self._position + offset) for offset in lane.offsets]
            if lane.speaks:
                batch |= collate([self._dataset.language(*sample) for sample in samples])
            if lane.module != LANGUAGE:
                batch["modality_inputs"][lane.module] = collate(
                    [self._dataset.modality(lane.module, *sample) for sample in samples]
                )
        self._position += self._step_size
        return batch

    def _locate(self, position: int) -> tuple[int, int]:
        """Dataset index and epoch of a position in the global order."""
        epoch, place = divmod(position, self._order.size)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._order.permutation(epoch)
        return int(self._permutation[place]), epoch


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Part of every microbatch step that one module on this rank sees.

    Attributes:
        module: the module's name.
        offsets: positions inside the step.
        speaks: whether the rank's tokens come from this lane (one lane per rank).
    """

    module: str
    offsets: range
    speaks: bool


def rank_lanes(layout: Layout, rank: int, micro_batch_size: int) -> tuple[Lane, ...]:
    """Lanes of a rank: one per hosted module.

    Raises:
        LayoutError: the samples of a step do not split evenly over a module's replicas.
    """
    hosted = layout.modules_of(rank)
    speaker = LANGUAGE if LANGUAGE in hosted else hosted[0]
    lanes = []
    for name in hosted:
        count = layout.samples_per_lane(name, micro_batch_size)
        first = layout[name].coordinates(rank)["dp"] * count
        lanes.append(Lane(module=name, offsets=range(first, first + count), speaks=name == speaker))
    return tuple(lanes)


def collate(samples: Sequence[Any]) -> Any:  # noqa: ANN401 - nested dictionaries of tensors
    """Stack equal nested dictionaries of tensors along a new first axis."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    return torch.stack(list(samples))
