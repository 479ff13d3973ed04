import importlib.util
import os
import subprocess


def compile_helpers() -> None:
    """Make the C++ dataset helper importable, compiling it where its Makefile is.

    Runs on one rank. A released wheel carries the compiled helper and no Makefile: there is
    nothing to compile. A checkout has the Makefile and is compiled as before.

    Raises:
        RuntimeError: When there is neither a Makefile nor a compiled helper, or make fails.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    if os.path.exists(os.path.join(folder, "Makefile")):
        done = subprocess.run(["make", "-C", folder], check=False)  # noqa: S607
        if done.returncode != 0:
            raise RuntimeError(f"make ended with {done.returncode} in {folder}")
    elif importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise RuntimeError(
            f"the C++ dataset helper is not installed and {folder} has no Makefile to compile it"
        )
