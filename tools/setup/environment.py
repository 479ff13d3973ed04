"""The project's environment ``.venv``: made, filled and kept in step with the tree.

Each step is recorded when it is finished, by the hash of what it was made from, so a second run
has nothing to do. A step that was cut off is noticed at the next start: what it may have left half
done is thrown away.
"""

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.setup.commands import run_quietly
from tools.setup.report import SetupError, say, step
from tools.setup.state import (
    State,
    dependencies_digest,
    fingerprint,
    load_state,
    megatron_digest,
    save_state,
)

# A wheel that pip builds itself would need a compiler and headers; every pinned package has a
# ready-made one.
READY_MADE_ONLY = "--only-binary=:all:"


class Environment:
    """The folder ``.venv`` of one checkout."""

    def __init__(self, root: Path) -> None:
        """Describe the environment of the checkout at ``root``; touches nothing."""
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.logs = Path(".cache") / "setup"

    def install(self) -> None:
        """Bring the environment in step with the tree; does nothing when it already is.

        Raises:
            SetupError: when a step fails, with the sentence for the user.
        """
        with self._lock():
            require_compiler_on_gpu_machines()
            state = self._sound_state()
            state = self._install_dependencies(state)
            self._install_megatron(state)

    def interpreter(self) -> str:
        """Return version and platform of the environment's Python, empty if it does not run."""
        code = "import sys, sysconfig; print(*sys.version_info[:3], sysconfig.get_platform())"
        try:
            answer = subprocess.run(
                [self.python, "-c", code], capture_output=True, text=True, check=False
            )
        except OSError:
            return ""
        return answer.stdout.strip() if answer.returncode == 0 else ""

    def site_packages(self) -> Path:
        """Return the folder that pip installs into."""
        found = sorted(self.folder.glob("lib/python3*/site-packages"))
        if not found:
            message = f"'{self.folder.name}' has no site-packages; delete the folder and run the same command again."
            raise SetupError(message)
        return found[0]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one set-up at a time work on this checkout."""
        (self.root / self.logs).mkdir(parents=True, exist_ok=True)
        with (self.root / self.logs / "lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with step("wait for another set-up of this checkout"):
                    fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _sound_state(self) -> State:
        """Return the record of a usable environment, made anew where the present one is not."""
        state = load_state(self.folder)
        if state.root != str(self.root) or not self.interpreter():
            return self._create("create .venv")
        if state.unfinished == "dependencies" and fingerprint(self.site_packages()) != state.before:
            return self._create("the last set-up was cut off, so create .venv anew")
        if state.unfinished == "megatron":
            self._drop_half_installed_megatron()
        return dataclasses.replace(state, unfinished="", before="")

    def _create(self, title: str) -> State:
        version = ".".join(map(str, sys.version_info[:3]))
        with step(f"{title} with Python {version}"):
            if self.folder.is_symlink() or self.folder.is_file():
                message = (
                    "'.venv' is a file or a link; move it away and run the same command again."
                )
                raise SetupError(message)
            if self.folder.exists():
                if any(self.folder.iterdir()) and not (self.folder / "pyvenv.cfg").exists():
                    message = "'.venv' is no Python environment; move it away and run the same command again."
                    raise SetupError(message)
                shutil.rmtree(self.folder)
            command = [sys.executable, "-m", "venv", str(self.folder)]
            run_quietly(command, log=self.logs / "environment.log", title="create .venv")
            state = State(root=str(self.root))
            save_state(self.folder, state)
        return state

    def _pip(self, *arguments: str, step_name: str, title: str) -> None:
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            *arguments,
        ]
        run_quietly(command, log=self.logs / f"{step_name}.log", title=title)

    def _install_dependencies(self, state: State) -> State:
        wanted = dependencies_digest(self.root, self.interpreter())
        if state.dependencies == wanted:
            return state
        with step("install the pinned packages (torch with CUDA is about 3 GB)"):
            self._begin(state, "dependencies")
            constraints = ("--constraint", "constraints.txt", READY_MADE_ONLY)
            name, title = "dependencies", "install the pinned packages"
            self._pip(self._pinned("pip"), *constraints, step_name="pip", title=title)
            self._pip(
                "--requirement", "requirements.txt", *constraints, step_name=name, title=title
            )
            # Packages that moved under Megatron may have taken something of its along: install it
            # again.
            state = dataclasses.replace(state, dependencies=wanted, megatron="")
            save_state(self.folder, state)
        return state

    def _pinned(self, package: str) -> str:
        for line in (self.root / "requirements.txt").read_text(encoding="utf-8").splitlines():
            if line.startswith(package + "=="):
                return line.split("#")[0].strip()
        message = f"requirements.txt pins no '{package}'; give it an exact version there."
        raise SetupError(message)

    def _install_megatron(self, state: State) -> None:
        wanted = megatron_digest(self.root)
        if state.megatron == wanted:
            return
        with step("build and install the patched megatron-core"):
            self._begin(state, "megatron")
            # Without isolation: the environment holds what the build asks for. Only the base wheel
            # has to be fetched, once; the build does that itself, by hash.
            flags = ("--no-deps", "--no-build-isolation", "--force-reinstall", "--no-index")
            self._pip(
                *flags,
                ".",
                step_name="megatron",
                title="build and install the patched megatron-core",
            )
            save_state(self.folder, dataclasses.replace(state, megatron=wanted))

    def _begin(self, state: State, name: str) -> None:
        before = fingerprint(self.site_packages())
        save_state(self.folder, dataclasses.replace(state, unfinished=name, before=before))

    def _drop_half_installed_megatron(self) -> None:
        """Remove what a cut-off install may have left; nothing else there has these names."""
        say("the last install of the patched megatron-core was cut off, so what it left is removed")
        for pattern in ("megatron", "megatron_core-*", "~egatron*"):
            for entry in self.site_packages().glob(pattern):
                shutil.rmtree(entry)


def require_compiler_on_gpu_machines() -> None:
    """Check for the C compiler that Triton needs when a program runs on a GPU; the CPU needs none.

    Raises:
        SetupError: when there is a GPU and no compiler.
    """
    compilers = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    if shutil.which("nvidia-smi") and not any(shutil.which(name) for name in compilers if name):
        message = (
            "this machine has an NVIDIA GPU but no C compiler, which Triton needs to start its kernels; "
            "install one (Debian and Ubuntu: apt-get install gcc) and run the same command again."
        )
        raise SetupError(message)
