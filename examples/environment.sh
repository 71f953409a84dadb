# Sourced by quickstart.sh and tests/run.sh: makes or re-uses the virtual environment, and installs the pinned packages into it.
#
#   use_environment ROOT [EXTRAS]     afterwards `python` and `torchrun` are those of $VENV (default: ROOT/.venv)
#
# A finished installation leaves a mark in the environment and is skipped as long as setup.py and constraints.txt stay the
# same. pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, a pip.conf) decide where the packages come from.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Prints a Python of at least 3.10: $PYTHON if set, else the first on the PATH.
find_python() {
    local candidate candidates=(python3 python python3.14 python3.13 python3.12 python3.11 python3.10)
    if [[ ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python of at least 3.10 found (tried: ${candidates[*]}). Install one, or name it: PYTHON=/path/to/python3"
}

make_venv() {
    local venv=$1 python
    python=$(find_python)
    echo "making the virtual environment $venv with $python"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1; then  # Debian without python3-venv: pip can still install itself there
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip install --quiet --target "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip
    else
        fail "$python has neither ensurepip nor pip, so no virtual environment can be made. On Debian and Ubuntu: apt install python3-venv. Or name an environment that has pip: VENV=/path/to/venv"
    fi
}

use_environment() {
    local root=$1 extras=${2:-} venv=${VENV:-$1/.venv} mark state
    [[ $venv == /* ]] || venv=$PWD/$venv
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        if [[ -d $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
            fail "VENV=$venv is neither a virtual environment nor empty: name another directory"
        fi
        make_venv "$venv"
    fi
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
        || fail "$venv holds $("$venv/bin/python" --version), and Python >= 3.10 is needed: remove it, or name another with VENV"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    unset PYTHONHOME

    mark="$venv/.megatron_lite${extras:+-$extras}"
    state="$root $(cat "$root/setup.py" "$root/constraints.txt" | cksum)"
    if [[ $(cat "$mark" 2>/dev/null) == "$state" ]]; then
        echo "$venv is up to date"
    else
        python -m pip install --constraint "$root/constraints.txt" --editable "$root${extras:+[$extras]}" \
            || fail "the installation failed; pip's message is above. It needs a package index: PIP_INDEX_URL names another"
        echo "$state" | tee "$venv/.megatron_lite" > "$mark"  # the extras include the rest
    fi
}
