# quickstart.sh and tests/run.sh source this file. It defines
#
#   use_environment ROOT [EXTRAS]     makes the virtual environment $VENV (default: ROOT/.venv), or
#                                     uses it again, and installs the pinned packages into it.
#                                     Then `python` and `torchrun` are those of the environment.
#
# A finished installation leaves a mark in the environment. As long as setup.py and constraints.txt
# stay the same, later calls install nothing. pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, a
# pip.conf) decide where the packages come from.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Prints the path of a Python >= 3.10: $PYTHON if it is set, else the first one on the PATH.
find_python() {
    local candidate candidates=(
        python3 python python3.14 python3.13 python3.12 python3.11 python3.10
    )
    if [[ ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python of at least 3.10 found (tried: ${candidates[*]}). Install one, or name it:" \
        "PYTHON=/path/to/python3"
}

make_venv() {
    local venv=$1 python
    python=$(find_python)
    echo "making the virtual environment $venv with $python"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        # Debian without python3-venv has no ensurepip, but its pip can install a pip elsewhere.
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip install --quiet pip --target "$("$venv/bin/python" -c \
            'import sysconfig; print(sysconfig.get_path("purelib"))')"
    else
        fail "$python has neither ensurepip nor pip, so it cannot make a virtual environment." \
            "On Debian and Ubuntu: apt install python3-venv. Or name an environment that has pip:" \
            "VENV=/path/to/venv"
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
        || fail "$venv has $("$venv/bin/python" --version), but Python >= 3.10 is needed: remove" \
            "it, or name another environment with VENV"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    unset PYTHONHOME

    mark="$venv/.megatron_lite${extras:+-$extras}"
    state="$root $(cat "$root/setup.py" "$root/constraints.txt" | cksum)"
    if [[ $(cat "$mark" 2>/dev/null) == "$state" ]]; then
        echo "$venv is up to date"
    else
        python -m pip install \
            --constraint "$root/constraints.txt" --editable "$root${extras:+[$extras]}" \
            || fail "the installation failed; pip's message is above. It needs a package" \
                "index: you can name another one with PIP_INDEX_URL"
        # An installation with extras contains the one without.
        echo "$state" | tee "$venv/.megatron_lite" > "$mark"
    fi
}
