"""Compare the series with an upstream tree: claims, fingerprints, drift and what is droppable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst

from tools.patch_series import seam as seams
from tools.patch_series import series as model
from tools.patch_series import syntax
from tools.patch_series.compose import Composed, compose
from tools.patch_series.records import Kind, Problem, Texts
from tools.patch_series.series import Patch, Series
from tools.patch_series.sparse import HEADER, header_text
from tools.patch_series.upstream import Upstream

NOT_THERE = "(not there)\n"
BaseTexts = Callable[[str], Upstream]
"""Opens the pinned wheel of a base, for the text that a patch was written against."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One upstream text that a patch replaces or anchors at, looked up in one tree."""

    patch: Patch
    key: str
    ours: str
    theirs: str | None
    """None where that tree has no such definition or no single such statement."""
    nearest: str = ""
    """What to show where a seam's anchor is lost."""
    equal: str = ""
    """How upstream has our change already; empty where it has not."""

    @property
    def is_seam(self) -> bool:
        """Whether this is a seam's statement and not a definition."""
        return "#" in self.key


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    composed: Composed
    problems: tuple[Problem, ...]

    @property
    def blocking(self) -> tuple[Problem, ...]:
        """The problems that stop a build."""
        return tuple(problem for problem in self.problems if problem.stops_build)


def check(series: Series, upstream: Upstream, base: str, open_base: BaseTexts) -> Report:
    """Check the whole series against a tree, by the fingerprints recorded for `base`."""
    composed = compose(series, upstream)
    problems = [*_claims(series, upstream, composed)]
    judged: set[tuple[str, str]] = set()
    for target in targets(series, upstream, composed):
        problem = _verdict(target, base, open_base)
        if problem is not None:
            problems.append(problem)
            judged.add((problem.patch, problem.where.partition("#")[0]))
    # The verdict on a target explains what stopped the engine there; once is enough.
    rest = [item for item in composed.problems if (item.patch, item.where) not in judged]
    return Report(composed=composed, problems=(*problems, *rest))


def _claims(series: Series, upstream: Upstream, composed: Composed) -> Iterator[Problem]:
    """Every file and definition of the sparse tree is claimed by exactly one patch."""
    tree = series.tree()
    for path in tree:
        whole = [patch.name for patch in series.patches if patch.takes(path)]
        if path in composed.sparse:
            if whole:
                text = "upstream has this file; claim single definitions in a graft"
                yield Problem(kind=Kind.CLAIM, where=path, message=text, patch=whole[0])
            yield from _definition_claims(series, path, composed)
        elif upstream.text(path) is not None:
            text = "upstream has this file and it is not Python, so it cannot be grafted"
            yield Problem(kind=Kind.CLAIM, where=path, message=text)
        elif len(whole) != 1:
            yield _claim_problem(path, whole, "`files`")
    yield from _empty_claims(series, set(tree))


def _empty_claims(series: Series, tree: set[str]) -> Iterator[Problem]:
    """Every claim of a patch finds something in the sparse tree."""
    for patch in series.patches:
        for claim in patch.files:
            if not any(path == claim or path.startswith(claim) for path in tree):
                text = "claims a file that the sparse tree does not have"
                yield Problem(kind=Kind.CLAIM, where=claim, message=text, patch=patch.name)
        for graft in patch.grafts:
            if graft.file not in tree:
                text = "claims definitions of a file that the sparse tree does not have"
                yield Problem(kind=Kind.CLAIM, where=graft.file, message=text, patch=patch.name)


def _definition_claims(series: Series, path: str, composed: Composed) -> Iterator[Problem]:
    defined = [entry.path for entry in composed.sparse[path].entries]
    for name in defined:
        owners = [patch.name for patch in series.patches for n in patch.names_in(path) if n == name]
        if len(owners) != 1:
            yield _claim_problem(model.definition_key(path, name), owners, "a graft's `names`")
    for patch in series.patches:
        for name in patch.names_in(path):
            if name not in defined:
                text = "claims a definition that our file does not have"
                where = model.definition_key(path, name)
                yield Problem(kind=Kind.CLAIM, where=where, message=text, patch=patch.name)
        for _, seam in patch.seams_in(path):
            if seam.where in defined:
                text = "has a seam in a definition that the series replaces; change it there"
                where = model.definition_key(path, seam.where)
                yield Problem(kind=Kind.CLAIM, where=where, message=text, patch=patch.name)


def _claim_problem(where: str, owners: list[str], key: str) -> Problem:
    text = f"is claimed by no patch; add it to {key} of one"
    if where.endswith(HEADER):
        text = (
            "decorators, bases or keywords are not upstream's; write them as upstream does, "
            "leave them all out, or claim their replacement by this name"
        )
    if owners:
        text = f"is claimed by {len(owners)} patches: {', '.join(owners)}"
    return Problem(kind=Kind.CLAIM, where=where, message=text)


def targets(series: Series, upstream: Upstream, composed: Composed) -> Iterator[Target]:
    """Yield every replaced definition and every seam, with the text that a tree has for it."""
    for patch in series.patches:
        for graft in patch.grafts:
            yield from _graft_targets(patch, graft, upstream, composed)
        for number, seam in enumerate(patch.seams, start=1):
            yield _seam_target(patch, model.seam_key(seam, number), seam, upstream)


def _graft_targets(
    patch: Patch, graft: model.Graft, upstream: Upstream, composed: Composed
) -> Iterator[Target]:
    ours = composed.sparse.get(graft.file)
    source = upstream.text(graft.file)
    if ours is None or source is None:
        return
    module = syntax.parse(source, graft.file)
    for entry in ours.entries:
        if entry.path in graft.names:
            theirs = definition_text(module, entry.path)
            yield Target(
                patch=patch,
                key=model.definition_key(graft.file, entry.path),
                ours=entry.text,
                theirs=theirs,
                equal=_equality(entry.text, theirs),
            )


def _equality(ours: str, theirs: str | None) -> str:
    if theirs is None:
        return ""
    if ours == theirs:
        return "letter for letter"
    return "apart from formatting and comments" if syntax.same_code(ours, theirs) else ""


def definition_text(module: cst.Module, path: str) -> str | None:
    """Return the text of a definition, None where there is none; several are joined."""
    name = path.removesuffix(f".{HEADER}")
    found = syntax.index(module).get(name, [])
    if not found:
        return None
    if name != path and isinstance(found[0].node, cst.ClassDef):
        return header_text(module, found[0].node)
    return "".join(syntax.text_of(module, item.node) for item in found)


def _seam_target(patch: Patch, key: str, seam: seams.Seam, upstream: Upstream) -> Target:
    source = upstream.text(seam.file)
    if source is None:
        return Target(patch=patch, key=key, ours=seam.code.strip() + "\n", theirs=None)
    module = syntax.parse(source, seam.file)
    site = seams.locate(module, seam)
    lost = isinstance(site, str)
    return Target(
        patch=patch,
        key=key,
        ours=seam.code.strip() + "\n",
        theirs=None if isinstance(site, str) else site.text,
        nearest=f"({site}; the nearest is)\n{seams.nearest(module, seam)}" if lost else "",
        equal="in that function" if seams.has_code(module, seam) else "",
    )


def _verdict(target: Target, base: str, open_base: BaseTexts) -> Problem | None:
    """Judge one replaced text; None where it is the one that the patch was written against."""
    recorded = target.patch.fingerprints.get(base, {}).get(target.key)
    if target.equal:
        text = f"upstream has this already ({target.equal}): drop it"
        return _problem(target, Kind.DROPPABLE, text)
    if recorded is None:
        return _unrecorded(target, base, open_base)
    if target.theirs is None:
        text = "upstream no longer has the text that this patch was written against"
    elif syntax.fingerprint(target.theirs) != recorded:
        text = "upstream's text is not the one that this patch was written against"
    else:
        return None
    was = text_in(open_base(base), target) or NOT_THERE
    return _problem(target, Kind.DRIFT, text, was)


def _unrecorded(target: Target, base: str, open_base: BaseTexts) -> Problem | None:
    if target.theirs is None:
        return None  # A new definition; or a seam without a place, which the engine explains.
    if text_in(open_base(base), target) is None:
        text = "upstream has gained a definition of this name, which we only add"
        return _problem(target, Kind.DRIFT, text, NOT_THERE)
    text = f"has no fingerprint for {base}: read what it replaces, then run `record`"
    return _problem(target, Kind.UNRECORDED, text)


def text_in(upstream: Upstream, target: Target) -> str | None:
    """Look up a target's text in another tree."""
    file, _, rest = target.key.partition("::")
    source = upstream.text(file)
    if source is None:
        return None
    module = syntax.parse(source, file)
    if not target.is_seam:
        return definition_text(module, rest)
    seam = target.patch.seams[int(rest.rpartition("#")[2]) - 1]
    site = seams.locate(module, seam)
    return None if isinstance(site, str) else site.text


def _problem(target: Target, kind: Kind, text: str, base: str | None = None) -> Problem:
    texts = None
    if base is not None:
        theirs = target.theirs or target.nearest or NOT_THERE
        texts = Texts(base=base, ours=target.ours, theirs=theirs)
    return Problem(kind=kind, where=target.key, message=text, patch=target.patch.name, texts=texts)
