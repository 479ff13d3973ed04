#!/bin/sh
# Find a Python that can hold this project and hand over to `tools/setup` with it.
# POSIX sh, because the only Python of a fresh machine may be missing or too old.
#
# The order: $SETUP_PYTHON if it is set, then the PATH, then pyenv's versions, then uv.
# 3.12 and 3.13 are what the base wheel is built for, so a newer one does not do either.
set -u
cd "$(dirname "$0")/../.." || exit 2

usable() {
    # A Python can be there and yet be unable to run (a shim) or to make an environment (no ensurepip).
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1
}

give_up() {
    echo "set-up: $1" >&2
    exit 2
}

candidates() {
    for name in python3.12 python3.13 python3 python; do
        command -v "$name"
    done
    for version in 3.12 3.13; do
        for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*; do
            echo "$folder/bin/python3"
        done
    done
}

from_uv() {
    # uv may know one that is not on the PATH, or fetch one.
    command -v uv >/dev/null 2>&1 || return 1
    for version in 3.12 3.13; do
        uv python find --no-project "$version" 2>/dev/null && return 0
    done
    echo "set-up: no Python 3.12 or 3.13 on this machine, so uv fetches one" >&2
    uv python install 3.12 >&2 && uv python find --no-project 3.12
}

find_python() {
    candidates | while IFS= read -r candidate; do
        if usable "$candidate"; then
            echo "$candidate"
            break
        fi
    done
}

HOME=${HOME:-/}
if [ -n "${SETUP_PYTHON:-}" ]; then
    usable "$SETUP_PYTHON" || give_up "SETUP_PYTHON is '$SETUP_PYTHON', which is no Python 3.12 or 3.13 \
with venv and ensurepip; name another one or unset it."
    python=$SETUP_PYTHON
else
    python=$(find_python)
    [ -n "$python" ] || python=$(from_uv)
    [ -n "$python" ] || give_up "no Python 3.12 or 3.13 (with venv and ensurepip) was found on the PATH, under \
pyenv or through uv; install one ('pyenv install 3.12', 'uv python install 3.12' or your system's python3.12 and \
python3.12-venv packages) and run the same command again."
fi
exec "$python" -m tools.setup "$@"
