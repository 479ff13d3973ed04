"""Look inside Megatron's distributed checkpoints: ``python -m tools.checkpoint COMMAND ...``.

Commands run in one process, without GPUs and without torch.distributed, and read a checkpoint piece
by piece. Exit codes: 0 fine or equal, 1 damaged or different, 2 a wrong call.
"""

# ruff: noqa: T201 - a command's answer goes to standard output
from __future__ import annotations

import argparse
import importlib
import signal
import sys
from typing import TYPE_CHECKING

from tools.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "inspect": ("tools.checkpoint.inspection", "modules, tensors, optimizer groups, random states"),
    "verify": ("tools.checkpoint.verification", "every file, every key, every byte"),
    "diff": ("tools.checkpoint.difference", "compare two checkpoints key by key, bit by bit"),
    "extract": ("tools.checkpoint.extraction", "one module as a checkpoint of its own"),
    "torture": ("tools.checkpoint.torture", "kill runs in the middle of saves and count losses"),
}
"""Module and one line of help of each command. The module, imported only when its command is
called, has ``add_arguments(parser)``, ``run(options) -> exit code`` and a docstring for --help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, (module_name, line) in COMMANDS.items():
        if command != name:
            commands.add_parser(command, help=line)
            continue
        module = importlib.import_module(module_name)
        own = commands.add_parser(
            command,
            help=line,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(own)
    options = parser.parse_args(arguments or ["--help"])
    try:
        return importlib.import_module(COMMANDS[options.command][0]).run(options)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return CheckpointError.exit_code


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `inspect PATH | head` ends quietly
    sys.exit(main())
