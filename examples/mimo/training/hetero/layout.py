"""Rank layout of a heterogeneous MIMO run: pure logic, no torch, no process.

One ``--module`` option describes the grid of one module. A :class:`Layout` holds all of them, gives
every rank its coordinates and refuses, before any process group exists, whatever could not work.

Rank order inside a grid is Megatron's default ``tp-cp-dp-pp``: the tensor-parallel coordinate
varies fastest, the pipeline coordinate slowest (``order`` of ``initialize_model_parallel``).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LANGUAGE = "language"
"""Name of the language module, fixed by ``megatron.core.models.mimo``."""

_SIZES = ("tp", "pp", "dp", "cp", "ep", "etp")
_KEYS = (*_SIZES, "offset")
_SYNTAX = "NAME:tp=1,pp=1,dp=1,cp=1,ep=1,etp=1,offset=0 or NAME:tp=1,colocated"


class LayoutError(ValueError):
    """A layout that cannot work; the message is one sentence with the flag and the numbers."""


class SharedLayoutError(LayoutError):
    """One that every rank raises with the same text, so that one of them may speak for all."""


@dataclass(frozen=True, kw_only=True)
class ModuleGrid:
    """Rank grid of one module: ``tp * cp * dp * pp`` consecutive ranks from ``offset``.

    ``ep`` and ``etp`` factor the same ranks again for experts (``etp * ep * expert-dp * pp``).
    ``etp`` defaults to ``tp``, as ``--expert-tensor-parallel-size`` does.
    """

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    offset: int = 0
    colocated: bool = False

    def __post_init__(self) -> None:
        """Check what one grid alone can get wrong."""
        for key in _SIZES:
            if getattr(self, key) < 1:
                msg = f"--module {self.name}:{key}={getattr(self, key)} must be at least 1."
                raise LayoutError(msg)
        if self.offset < 0:
            msg = f"--module {self.name}:offset={self.offset} must not be negative."
            raise LayoutError(msg)
        dense = self.tp * self.cp * self.dp
        if dense % (self.etp * self.ep):
            msg = (
                f"--module {self.name}: etp*ep = {self.etp}*{self.ep} must divide tp*cp*dp = "
                f"{self.tp}*{self.cp}*{self.dp} = {dense}, since experts share the dense ranks "
                f"(etp defaults to tp)."
            )
            raise LayoutError(msg)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def ranks(self) -> range:
        """Global ranks, consecutive."""
        return range(self.offset, self.offset + self.size)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates (tp, pp, dp, cp, ep) of a global rank of this grid."""
        local = rank - self.offset
        stage, within = divmod(local, self.tp * self.cp * self.dp)
        return {
            "tp": within % self.tp,
            "pp": stage,
            "dp": within // (self.tp * self.cp),
            "cp": within // self.tp % self.cp,
            "ep": within // self.etp % self.ep,
        }


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All module grids of a run over ``world_size`` ranks, in the order of the options."""

    grids: tuple[ModuleGrid, ...]
    world_size: int

    def __post_init__(self) -> None:
        """Check what the grids can get wrong together."""
        _check_names(self.grids)
        _check_colocation(self.grids)
        _check_cover(self.grids, self.world_size)
        if not self.colocated:
            _check_disjoint(self.grids, self.world_size)
            _check_bridges(self.grids)

    @classmethod
    def from_options(cls, options: Sequence[str], world_size: int) -> Layout:
        """Parse the ``--module`` options and fill in what they leave open.

        An encoder's ``dp`` defaults to 1 (colocated: to what its ``tp`` and ``cp`` leave of the
        language ranks), the language module's to the ranks that the other modules leave. Ranks
        follow in the order of the options unless ``offset`` is given.

        Raises:
            LayoutError: the layout cannot work.
        """
        if not options:
            msg = f"--module is missing: give at least one, as {_SYNTAX}."
            raise LayoutError(msg)
        if world_size < 1:
            msg = f"--world-size {world_size} must be at least 1."
            raise LayoutError(msg)
        drafts = [_parse(option) for option in options]
        _check_names(drafts)
        return cls(grids=_place(drafts, world_size), world_size=world_size)

    @property
    def colocated(self) -> bool:
        """Whether all modules share the same ranks, also true of a language module alone."""
        return all(grid.colocated for grid in self.encoders)

    @property
    def language(self) -> ModuleGrid:
        """Grid of the language module."""
        return self[LANGUAGE]

    @property
    def encoders(self) -> tuple[ModuleGrid, ...]:
        """Grids of the modality modules."""
        return tuple(grid for grid in self.grids if grid.name != LANGUAGE)

    def __getitem__(self, name: str) -> ModuleGrid:
        """Grid of a module by name."""
        return next(grid for grid in self.grids if grid.name == name)

    def record(self) -> dict[str, dict[str, int]]:
        """Sizes and offset of every grid as plain values, in the order of the options.

        A checkpoint keeps it (``args.module_layout``), so that a later run knows of each module
        what it was saved under.
        """
        return {grid.name: {key: getattr(grid, key) for key in _KEYS} for grid in self.grids}

    def modules_of(self, rank: int) -> tuple[str, ...]:
        """Names of the modules that a rank hosts."""
        return tuple(grid.name for grid in self.grids if rank in grid.ranks)

    def samples_per_lane(
        self, name: str, micro_batch_size: int, flag: str = "--micro-batch-size"
    ) -> int:
        """Samples of one microbatch step that one data-parallel replica of a module sees.

        One step covers ``micro_batch_size * language dp`` samples; every module splits the same
        samples, in order, over its own data-parallel replicas. ``flag`` is where the size is from.

        Raises:
            LayoutError: the samples cannot be split evenly.
        """
        samples = micro_batch_size * self.language.dp
        lanes = self[name].dp
        if samples % lanes:
            msg = (
                f"{flag} {micro_batch_size} times language dp {self.language.dp} = "
                f"{samples} samples cannot be split evenly over --module {name}:dp={lanes}."
            )
            raise LayoutError(msg)
        return samples // lanes


@dataclass(kw_only=True)
class _Draft:
    """A ``--module`` option before defaults are known (``None``: left open)."""

    name: str
    sizes: dict[str, int]
    colocated: bool

    def product(self) -> int:
        """Ranks per data-parallel replica."""
        return math.prod(self.sizes.get(key, 1) for key in ("tp", "pp", "cp"))


def _parse(option: str) -> _Draft:
    name, _, rest = option.partition(":")
    if not name.isidentifier():
        msg = f"--module {option!r} does not start with a module name; write {_SYNTAX}."
        raise LayoutError(msg)
    sizes: dict[str, int] = {}
    colocated = False
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key == "colocated" and not equals:
            colocated = True
            continue
        if key not in _KEYS:
            known = ", ".join((*_KEYS, "colocated"))
            msg = f"--module {name}: unknown key {key!r}; known are {known}."
            raise LayoutError(msg)
        if key in sizes:
            msg = f"--module {name}: {key} is given twice."
            raise LayoutError(msg)
        try:
            sizes[key] = int(value)
        except ValueError:
            msg = f"--module {name}:{key}={value} is not a whole number."
            raise LayoutError(msg) from None
    draft = _Draft(name=name, sizes=sizes, colocated=colocated)
    ModuleGrid(name=name, **{key: size for key, size in sizes.items() if key in ("tp", "pp", "cp")})
    return draft


def _place(drafts: Sequence[_Draft], world_size: int) -> tuple[ModuleGrid, ...]:
    """Fill in dp and offset of every draft."""
    language = next(draft for draft in drafts if draft.name == LANGUAGE)
    separate = [d for d in drafts if d is not language and not d.colocated]
    taken = sum(d.product() * d.sizes.get("dp", 1) for d in separate)
    left = max(1, (world_size - taken) // language.product())
    language_dp = language.sizes.get("dp", left)
    language_size = language.product() * language_dp
    grids: list[ModuleGrid] = []
    cursor = 0
    for draft in drafts:
        sizes = dict(draft.sizes)
        if draft is language:
            sizes["dp"] = language_dp
        elif draft.colocated:
            if "offset" in sizes:
                msg = (
                    f"--module {draft.name}:colocated,offset={sizes['offset']}: a colocated module "
                    "has the offset of the language module; leave one of the two out."
                )
                raise LayoutError(msg)
            sizes.setdefault("dp", max(1, language_size // draft.product()))
        sizes.setdefault("etp", sizes.get("tp", 1))
        if not draft.colocated:
            sizes.setdefault("offset", cursor)
            cursor = sizes["offset"] + draft.product() * sizes.get("dp", 1)
        grids.append(ModuleGrid(name=draft.name, colocated=draft.colocated, **sizes))
    offset = next(grid.offset for grid in grids if grid.name == LANGUAGE)
    return tuple(dataclasses.replace(g, offset=offset) if g.colocated else g for g in grids)


def _check_names(modules: Sequence[ModuleGrid | _Draft]) -> None:
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            msg = f"--module {name} is given {names.count(name)} times; a module has one grid."
            raise LayoutError(msg)
    if LANGUAGE not in names:
        msg = f"--module {LANGUAGE}:... is missing; the modules given are {', '.join(names)}."
        raise LayoutError(msg)


def _check_colocation(grids: Sequence[ModuleGrid]) -> None:
    language = next(grid for grid in grids if grid.name == LANGUAGE)
    if language.colocated:
        msg = "--module language:colocated: write colocated at the encoders, not at the language."
        raise LayoutError(msg)
    shared = [grid.name for grid in grids if grid.colocated]
    apart = [grid.name for grid in grids if not grid.colocated and grid.name != LANGUAGE]
    if shared and apart:
        msg = (
            f"--module {shared[0]} is colocated but {apart[0]} is not; either all encoders share "
            "the language ranks or none does."
        )
        raise LayoutError(msg)
    for grid in grids:
        if shared and grid.pp > 1:
            msg = f"--module {grid.name}:pp={grid.pp} must be 1 in a colocated layout."
            raise LayoutError(msg)
        if grid.colocated and grid.size != language.size:
            msg = (
                f"--module {grid.name} (colocated) has tp*cp*dp = {grid.tp}*{grid.cp}*{grid.dp} = "
                f"{grid.size} ranks, but the language module that it shares has {language.size}."
            )
            raise LayoutError(msg)
        if grid.colocated and max(grid.dp, language.dp) % min(grid.dp, language.dp):
            _raise_ratio(grid, language)


def _check_cover(grids: Sequence[ModuleGrid], world_size: int) -> None:
    """Every rank hosts a module and no module reaches beyond the world."""
    last = max(grid.offset + grid.size for grid in grids)
    wanted = ", ".join(f"{g.name} {g.offset}-{g.offset + g.size - 1}" for g in grids)
    if last > world_size:
        msg = f"--module options need {last} ranks ({wanted}), but the world size is {world_size}."
        raise LayoutError(msg)
    for rank in range(world_size):
        if not any(rank in grid.ranks for grid in grids):
            msg = (
                f"rank {rank} of {world_size} hosts no module ({wanted}); adjust dp or offset of "
                "the --module options or the number of processes."
            )
            raise LayoutError(msg)


def _check_disjoint(grids: Sequence[ModuleGrid], world_size: int) -> None:
    language = next(grid for grid in grids if grid.name == LANGUAGE)
    for index, first in enumerate(grids):
        for second in grids[index + 1 :]:
            common = sorted(set(first.ranks) & set(second.ranks))
            if common:
                msg = (
                    f"--module {first.name} and {second.name} both claim rank {common[0]}; give "
                    "them disjoint ranks, or mark every encoder colocated."
                )
                raise LayoutError(msg)
    if world_size - 1 not in language.ranks:
        msg = (
            f"--module language ends at rank {language.ranks[-1]} of {world_size}; give it last "
            "(or a higher offset), since Megatron logs the loss from the last rank."
        )
        raise LayoutError(msg)


def _check_bridges(grids: Sequence[ModuleGrid]) -> None:
    """The bridge splits or joins whole data-parallel replicas and knows no context parallelism."""
    language = next(grid for grid in grids if grid.name == LANGUAGE)
    for grid in grids:
        if len(grids) > 1 and grid.cp > 1:
            msg = (
                f"--module {grid.name}:cp={grid.cp} must be 1 between disjoint modules: the bridge "
                "does not split sequences."
            )
            raise LayoutError(msg)
        if max(grid.dp, language.dp) % min(grid.dp, language.dp):
            _raise_ratio(grid, language)


def _raise_ratio(grid: ModuleGrid, language: ModuleGrid) -> None:
    msg = (
        f"--module {grid.name}:dp={grid.dp} and language:dp={language.dp}: one must be a multiple "
        "of the other."
    )
    raise LayoutError(msg)
