"""Run a script or a module on the CPU: ``python -m megatron.training.cpu_device SCRIPT ARGS``."""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import socket
import sys
import time
import warnings
from pathlib import Path

from . import switch
from .arguments import add_cpu_arguments
from .redirect import table

_LET_GO_SECONDS = 0.1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options, which come before the script."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.training.cpu_device",
        description="Run a Megatron script on the CPU over gloo, alone or under torchrun.",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("--nproc-per-node", type=int, help="start this many processes")
    parser.add_argument(
        "--keep-arguments", action="store_true", help="do not supply Megatron's flags for the CPU"
    )
    parser.add_argument("--list", action="store_true", help="print what is redirected, and end")
    parser.add_argument("script", nargs="?", help="script (or module, with -m) to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _set_single_process() -> None:
    """Describe a job of one process in the environment, as torchrun describes larger ones."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
    ):
        os.environ[name] = value


def _start_processes(options: argparse.Namespace) -> int:
    """Start the processes with torchrun, each running this launcher; return the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    own = ["--keep-arguments"] if options.keep_arguments else []
    own += ["-m"] if options.module else []
    try:
        run.main(
            ["--standalone", f"--nproc-per-node={options.nproc_per_node}"]
            + ["-m", "megatron.training.cpu_device"]
            + [*own, options.script, *options.arguments]
        )
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"error: rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def _announce() -> None:
    """Say once per job that it runs on the CPU."""
    if os.environ["RANK"] == "0":
        processes = int(os.environ["WORLD_SIZE"])
        print(f"running on CPU with gloo, {processes} process{'es' * (processes > 1)}", flush=True)


def _run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run the script in this process as ``__main__`` with ``arguments``."""
    sys.argv = [options.script, *arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.script).resolve().parent)
        runpy.run_path(options.script, run_name="__main__")


def _leave_world() -> None:
    """End what gloo still runs in the background, after a script that left its groups alone.

    A gloo thread may be about to free the tensors of the last collective, for which it needs the
    interpreter's lock; the interpreter ends a thread that asks while it shuts down, and C++ then
    aborts the process. The groups that nobody holds join their threads here; those of others get
    the time to let go of their tensors.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
    time.sleep(_LET_GO_SECONDS)  # without the lock


def main(argv: list[str] | None = None) -> int:
    """Run the launcher and return its exit status; the script's own exit passes through."""
    options = _parser().parse_args(argv)
    if options.list:
        switch.enable()
        print(table())
        return 0
    try:
        _check(options)
        starts_processes = options.nproc_per_node is not None and "RANK" not in os.environ
        if starts_processes or os.environ.get("RANK", "0") != "0":
            warnings.filterwarnings("ignore", message=".*a CPU run needs")  # rank 0 warns
        arguments = options.arguments
        if not options.keep_arguments:
            arguments = add_cpu_arguments(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if starts_processes:
        return _start_processes(options)
    if "RANK" not in os.environ:
        _set_single_process()
    switch.enable()
    _announce()
    try:
        _run(options, arguments)
    except SystemExit as leaving:
        if not leaving.code:
            _leave_world()
        raise
    _leave_world()
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a command line that cannot run."""
    if options.script is None:
        raise ValueError("give the script to run, or -m and a module")
    if not options.module and not Path(options.script).is_file():
        raise ValueError(f"script {options.script} does not exist")
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node {options.nproc_per_node} is not a number of processes")


if __name__ == "__main__":
    sys.exit(main())
