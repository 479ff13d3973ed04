"""What the commands print: problems with their three texts, and the status for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.patch_series import check, installed
from tools.patch_series.records import Kind, Problem, Texts
from tools.patch_series.series import Patch, Series
from tools.patch_series.upstream import Upstream

_WIDTH = 78


@dataclass(frozen=True, kw_only=True)
class Carried:
    """How many of the lines we graft are upstream's own, unchanged."""

    unchanged: int
    replaced: int
    """Lines of the definitions that replace an upstream one."""
    grafted: int
    """All lines that the series puts into the tree."""

    def text(self) -> str:
        """Return the figures as one line."""
        share = 100 * self.unchanged / self.grafted if self.grafted else 0.0
        return (
            f"{self.unchanged} of {self.grafted} grafted lines are upstream's, unchanged "
            f"({share:.1f}%); {self.replaced} lines replace upstream definitions"
        )


def problems_text(problems: Iterable[Problem]) -> str:
    """Return all problems as text, three texts where a drift has them."""
    return "\n".join(_problem_text(problem) for problem in problems)


def _problem_text(problem: Problem) -> str:
    patch = f" [{problem.patch}]" if problem.patch else ""
    text = f"{problem.kind.value}{patch} {problem.where}: {problem.message}"
    return text + _three_texts(problem.texts) if problem.texts else text


def _three_texts(texts: Texts) -> str:
    parts = [
        ("base: what the patch was written against", texts.base),
        ("ours: what the patch puts there", texts.ours),
        ("theirs: what that upstream has", texts.theirs),
    ]
    changes = difflib.unified_diff(
        texts.base.splitlines(), texts.theirs.splitlines(), "base", "theirs", lineterm="", n=1
    )
    parts.append(("base to theirs", "\n".join(changes) + "\n"))
    return "".join(f"\n{f'--- {title} '.ljust(_WIDTH, '-')}\n{body}" for title, body in parts)


def carried(series: Series, upstream: Upstream, report: check.Report) -> Carried:
    """Count the upstream lines that the series carries unchanged."""
    unchanged = replaced = 0
    for target in check.targets(series, upstream, report.composed):
        if target.theirs is None or target.is_seam:
            continue
        ours, theirs = _lines(target.ours), _lines(target.theirs)
        matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
        unchanged += sum(block.size for block in matcher.get_matching_blocks())
        replaced += len(ours)
    sparse = report.composed.sparse
    grafted = sum(len(_lines(entry.text)) for file in sparse.values() for entry in file.entries)
    tree = series.tree()
    whole = [path for path in tree if path not in sparse and path.endswith(".py")]
    grafted += sum(len(_lines(tree[path].decode())) for path in whole)
    grafted += sum(len(_lines(seam.code)) for patch in series.patches for seam in patch.seams)
    return Carried(unchanged=unchanged, replaced=replaced, grafted=grafted)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def status_text(series: Series, upstream: Upstream, report: check.Report) -> str:
    """Return the status: base, each patch, what is installed, what is carried."""
    lines = [f"base       {upstream.label}", f"builds     {series.version(upstream.version)}"]
    tree = series.tree()
    for patch in series.patches:
        state = _state([item for item in report.problems if item.patch == patch.name])
        lines.append(f"patch      {patch.name}  {state}: {patch.title} ({_extent(patch, tree)})")
    loose = [item for item in report.problems if not item.patch]
    lines += [f"problem    {item.where}: {item.message}" for item in loose]
    verdict = installed.inspect(series.root, regraft=not report.blocking)
    lines.append(f"installed  {verdict.message()}")
    lines.append(f"carried    {carried(series, upstream, report).text()}")
    return "\n".join(lines)


def _state(problems: Sequence[Problem]) -> str:
    kinds = {problem.kind for problem in problems}
    if not kinds:
        return "applied"
    for kind, word in ((Kind.DRIFT, "stale"), (Kind.UNRECORDED, "not recorded")):
        if kind in kinds:
            return word
    return "droppable" if kinds == {Kind.DROPPABLE} else "broken"


def _extent(patch: Patch, tree: Iterable[str]) -> str:
    names = sum(len(graft.names) for graft in patch.grafts)
    whole = sum(patch.takes(path) for path in tree)
    counts = ((names, "definition"), (len(patch.seams), "seam"), (whole, "new file"))
    parts = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count]
    return ", ".join(parts)
