"""The rules of this repository that no linter knows: ``python -m tools.setup.house_rules``.

Every rule takes one tracked file and yields what it finds, so the rules can be tested on made-up
files.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
MAX_FUNCTION_LINES = 80
# The package that stands in for the accelerator has to name what it stands in for.
CPU_DEVICE = "megatron/training/cpu_device/"

# Put together from parts, so that this file does not break the rules it states.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~}])/(?:" + "home|root|Users|work|mnt" + r")/\w")
FOREIGN_HEADER = re.compile("NVIDIA " + "CORPORATION", re.IGNORECASE)
REGISTRY_HOST = re.compile("pypi" + r"\.org|python" + r"hosted\.org", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One tracked text file."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree of a Python file, else None (the linters report what does not parse)."""
        if not self.path.endswith(".py"):
            return None
        try:
            return ast.parse(self.text)
        except SyntaxError:
            return None

    @property
    def is_model_code(self) -> bool:
        """Whether groups and devices have to be passed in here."""
        return self.path.startswith(("examples/mimo/", "megatron/")) and not self.path.startswith(
            CPU_DEVICE
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        """Return the finding as linters print theirs."""
        return f"{self.path}:{self.line}: {self.message}"


def _matches(source: Source, pattern: re.Pattern[str], message: str) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if pattern.search(line):
            yield Finding(path=source.path, line=number, message=message)


def no_machine_in_the_tree(source: Source) -> Iterator[Finding]:
    """Neither a path of somebody's machine, nor a registry's host, nor a foreign licence header."""
    yield from _matches(source, ABSOLUTE_PATH, "an absolute path of a machine")
    yield from _matches(source, REGISTRY_HOST, "the host name of a package registry")
    yield from _matches(
        source, FOREIGN_HEADER, "somebody else's copyright line; all code here is our own"
    )


def files_and_functions_are_short(source: Source) -> Iterator[Finding]:
    """A Python file has at most 500 lines, a function at most 80."""
    count = source.text.count("\n")
    if source.path.endswith(".py") and count > MAX_LINES:
        yield Finding(path=source.path, line=count, message=f"{count} lines, more than {MAX_LINES}")
    for node in ast.walk(source.tree) if source.tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                message = f"'{node.name}' has {size} lines, more than {MAX_FUNCTION_LINES}"
                yield Finding(path=source.path, line=node.lineno, message=message)


def devices_are_passed_in(source: Source) -> Iterator[Finding]:
    """No literal naming the CUDA device in model code."""
    if not source.is_model_code or source.tree is None:
        return
    for node in ast.walk(source.tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
            message = f'the literal "{value}"; take the device as an argument'
            yield Finding(path=source.path, line=node.lineno, message=message)


def groups_are_passed_in(source: Source) -> Iterator[Finding]:
    """No read of ``parallel_state`` in model code."""
    if not source.is_model_code or source.tree is None:
        return
    for node in ast.walk(source.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            names = [node.id if isinstance(node, ast.Name) else node.attr]
        if any({"parallel_state", "mpu"} & set(name.split(".")) for name in names):
            message = "parallel_state is global; take the process group as an argument"
            yield Finding(path=source.path, line=node.lineno, message=message)


RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    no_machine_in_the_tree,
    files_and_functions_are_short,
    devices_are_passed_in,
    groups_are_passed_in,
)


def tracked_sources(root: Path) -> Iterator[Source]:
    """Yield every text file that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a picture, or a file removed and not committed yet
        yield Source(path=str(PurePosixPath(name)), text=text)


def main() -> int:
    """Print every finding and return 1 if there is one."""
    findings = sorted(
        {finding for source in tracked_sources(ROOT) for rule in RULES for finding in rule(source)},
        key=lambda finding: (finding.path, finding.line),
    )
    for finding in findings:
        print(finding)  # noqa: T201 - the program's output
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
