"""Write ``constraints.txt``: the versions of everything that the pinned packages bring along."""

import re
import subprocess

from tools.setup.environment import Environment

HEADER = """\
# Versions of what requirements.txt brings along, so that two machines hold the same packages.
# None of these is asked for by name; pip uses a line only where something needs that package.
# Written by `sh tools/setup/setup.sh --lock`.
"""


def normal_name(specification: str) -> str:
    """Return the package's name as the packaging standard compares names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=@ ]", specification)[0]).lower()


def write_constraints(environment: Environment) -> None:
    """Write the file from what is installed, less what ``requirements.txt`` names itself."""
    command = [str(environment.python), "-m", "pip", "freeze", "--disable-pip-version-check"]
    frozen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = (environment.root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    named = {normal_name(line) for line in lines if "==" in line and not line.startswith("#")}
    kept = [line for line in frozen if normal_name(line) not in named | {"megatron-core"}]
    text = HEADER + "".join(line + "\n" for line in sorted(kept, key=str.lower))
    (environment.root / "constraints.txt").write_text(text, encoding="utf-8")
