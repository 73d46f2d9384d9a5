# What the stack for GPUs needs of a machine and no package brings. Sourced by setup.sh.
# Each check prints nothing, or one line that says what is wrong and what to do.

NEEDED_DRIVER=580    # the first that runs CUDA 13, which torch 2.13 and vLLM 0.32 are built with
NEEDED_GLIBC=2.31    # the oldest that every pin has a wheel for
NEEDED_DISK_GB=25    # 4 GB of wheels, unpacked, in uv's cache and in .venv
ADVISED_SHM_MB=1024  # a container has 64 MB unless told otherwise

check_platform() {
    [[ "$(uname -sm)" == "Linux x86_64" ]] || echo "this is $(uname -sm), and requirements.txt is for Linux on x86_64."
    local glibc
    glibc="$({ getconf GNU_LIBC_VERSION 2>/dev/null || true; } | cut -d' ' -f2)"
    [[ "$(printf '%s\n' "$NEEDED_GLIBC" "${glibc:-0}" | sort -V | head -1)" == "$NEEDED_GLIBC" ]] ||
        echo "glibc is ${glibc:-not there}, and the wheels need $NEEDED_GLIBC or newer (Ubuntu 20.04, Debian 11, RHEL 9)."
}

check_driver() {
    local driver
    if ! command -v nvidia-smi >/dev/null; then
        echo "there is no nvidia-smi, so no NVIDIA driver. Install driver $NEEDED_DRIVER or newer; in a container, start it with" \
            "'docker run --gpus all'. Without a GPU: bash scripts/setup_cpu.sh"
        return
    fi
    if ! driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1)"; then
        echo "nvidia-smi fails (${driver//$'\n'/ }), so no GPU is in reach. Does plain 'nvidia-smi' list one?"
        return
    fi
    driver="$(head -1 <<<"$driver")"
    [[ "${driver%%.*}" =~ ^[0-9]+$ && "${driver%%.*}" -ge "$NEEDED_DRIVER" ]] ||
        echo "the NVIDIA driver is ${driver:-unknown}, and CUDA 13 needs $NEEDED_DRIVER or newer. Update the driver; in a container" \
            "it is the host's."
}

# Triton compiles its launchers while it runs, and pycosat is published as source alone. nvcc is not needed.
check_compiler() {
    local python="$1" compiler="${CC:-gcc}" headers
    if ! command -v "$compiler" >/dev/null; then
        echo "there is no C compiler ($compiler), and Triton compiles at run time. On Debian and Ubuntu: apt install build-essential"
        return
    fi
    headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    if [[ ! -f "$headers/Python.h" ]]; then
        echo "$python has no headers ($headers/Python.h), which Triton compiles with. On Debian and Ubuntu: apt install" \
            "$(python_package "$python")-dev. Or take a Python of uv's, which has them: uv python install 3.11," \
            "then PYTHON=\$(uv python find --managed-python 3.11) bash scripts/setup_gpu.sh"
        return
    fi
    echo '#include <Python.h>' | "$compiler" -I "$headers" -x c -fsyntax-only - 2>/dev/null ||
        echo "$compiler cannot compile against $headers/Python.h. Is it whole? On Debian and Ubuntu: apt install build-essential"
}

check_disk() {
    local free_gb
    free_gb="$(($({ df -Pk "$ROOT" 2>/dev/null || true; } | awk 'END {print $4 + 0}') / 1048576))"
    [[ -x "$VENV/bin/python" || "$free_gb" -ge "$NEEDED_DISK_GB" ]] ||
        echo "$free_gb GB are free under $ROOT, and the stack takes up to $NEEDED_DISK_GB GB. Make room, or clone to a larger disk."
}

# Not needed to begin with: Ray goes to /tmp instead, and NCCL fails only where GPUs cannot reach each other directly.
advise_shm() {
    local shm_mb
    shm_mb="$(($({ df -Pk /dev/shm 2>/dev/null || true; } | awk 'END {print $2 + 0}') / 1024))"
    [[ "$shm_mb" -ge "$ADVISED_SHM_MB" ]] ||
        say "note: /dev/shm has $shm_mb MB. Ray gets slow and NCCL may fail with several GPUs. Start the container with" \
            "--shm-size=16g or --ipc=host."
}

check_gpu_machine() {
    [[ "${GPU_CHECKS:-on}" != off ]] || return 0
    local problems
    problems="$(check_platform; check_driver; check_compiler "$1"; check_disk)"
    advise_shm
    [[ -n "$problems" ]] || return 0
    say "this machine lacks what the stack for GPUs needs:"
    sed 's/^/  - /' <<<"$problems" >&2
    die "to set up here for other machines, leave the checks out: GPU_CHECKS=off bash scripts/setup_gpu.sh"
}
