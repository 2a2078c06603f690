"""The checks of Python, packages, and the devices that they can compute on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from swarm_cli.doctor.check import DoctorCheck, Finding, failed, ok, warning
from swarm_models.quants import METHODS
from swarm_protocol.imports.versions import DISTRIBUTION, installed_versions, required_packages
from swarm_protocol.system import usable_cpus

_SHOWN = ("torch", "transformers", "grpcio", "hivemind", "numpy")
_IMPORT_S = 120.0  # for torch, from a slow disk without a cached copy
_CPU_INFO = Path("/proc/cpuinfo")
_UPDATE = f"pip install -U {DISTRIBUTION}"


def software_checks() -> list[DoctorCheck]:
    version = platform.python_version()
    return [
        DoctorCheck("Python", lambda: [ok("Python", f"{version}, {platform.system()} {platform.machine()}")]),
        DoctorCheck("packages", _packages),
        DoctorCheck("processor", lambda: [processor(_cpu_flags())]),
        DoctorCheck("kernel", lambda: [compiled_kernel()], _IMPORT_S),
        DoctorCheck("GPU", _gpu, _IMPORT_S),
    ]


def _packages() -> Iterator[Finding]:
    try:
        required = required_packages()
    except metadata.PackageNotFoundError:
        yield warning("packages", f"{DISTRIBUTION} is not installed, only its source is here", "pip install -e .")
        return
    yield packages(required)


def packages(required: Iterable[str]) -> Finding:
    """Return a finding on the ``required`` packages, which are lines of a distribution's metadata."""
    versions, wrong = installed_versions(required)
    if wrong:
        return failed("packages", "; ".join(wrong), _UPDATE)
    return ok("packages", ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions))


def _cpu_flags() -> set[str]:
    """Return the processor's features according to /proc; an empty set if they are unknown."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )


def processor(flags: set[str]) -> Finding:
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX VNNI"}
    cores = len(usable_cpus())
    count = f"{cores} {'core' if cores == 1 else 'cores'}"
    has = ", ".join(text for name, text in names.items() if name in flags)
    if has or platform.machine() not in ("x86_64", "AMD64") or not flags:
        return ok("processor", f"{count}{f' with {has}' if has else ''}")
    to_do = "use it as a client, or serve few blocks from it: blocks in int8 are slow here"
    return warning("processor", f"{count} without AVX2", to_do)


def compiled_kernel() -> Finding:
    """Return which kernel multiplies with int8 and int4 weights on the CPU."""
    from swarm_models.kernels.int8_linear import FbgemmWeight, fastest
    from swarm_models.kernels.library import ENV_ISA, kernel, why_none

    library = kernel()
    if library is None:
        to_do = f"install a C++ compiler, then: pip install --force-reinstall --no-deps {DISTRIBUTION}"
        if ENV_ISA in os.environ:
            to_do = f"unset {ENV_ISA}, which is for tests and comparisons"
        return warning("kernel", f"none ({why_none()}): torch multiplies and attends, which is slower", to_do)
    note = "; int8 is multiplied by fbgemm, which is faster here" if fastest() is FbgemmWeight else ""
    return ok("kernel", f"compiled; it uses {library.name}{note}")


def _gpu() -> Iterator[Finding]:
    import torch

    from swarm_models.gpu.devices import best_device
    from swarm_models.gpu.fp8_weight import has_fp8_products
    from swarm_models.quantization import devices_of

    if torch.cuda.is_available():
        driver = _driver()
        for index in range(torch.cuda.device_count()):
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
            about = f"{torch.cuda.get_device_name(index)}, {free:.1f} of {total:.1f} GiB free{driver}"
            fp8 = "; it runs --quant fp8" if has_fp8_products(torch.device("cuda", index)) else ""
            yield ok("GPU", f"cuda:{index} is {about}{fp8}")
    elif Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        found = f"there is one{_driver()}, but torch {torch.__version__} cannot use it"
        yield warning("GPU", found, "install a torch for CUDA, see pytorch.org, or a driver that fits it")
    elif (kind := best_device()) != "cpu":
        devices = {method: devices_of(method) for method in METHODS}
        others = ", ".join(method for method in METHODS if "cpu" in devices[method] and kind not in devices[method])
        yield ok("GPU", f"{kind} computes blocks with --quant none; {others} have no kernel for it: the CPU runs them")
    else:
        yield ok("GPU", "none: blocks are computed on the CPU")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", driver {said.splitlines()[0].strip()}" if said.strip() else ""
