"""Versions, devices and source of a measurement, written beside every result.

No host name and no environment variables: results get published, and variables hold secrets.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

# Dense peaks: data sheets like to print twice as much, with structured sparsity. 16-bit numbers are
# for matrix units that accumulate in float32, float32 is without TF32. A name must match as a
# whole: an H100 NVL, a MIG slice or a laptop's 4090 is another device.
_TERA = 1e12

# name pattern: (float32, bfloat16, float16), TFLOP/s; None where the GPU has no matrix unit for it
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet: FP32 19.5, BF16 and FP16 312
    r"A100-(SXM4|PCIE)-\d0GB|A100 80GB PCIe": (19.5, 312, 312),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM: FP32 67, BF16 and FP16 1,979 with sparsity
    r"H100 80GB HBM3|H100 SXM5?": (67, 989.5, 989.5),
    # NVIDIA H100 Tensor Core GPU datasheet, PCIe: FP32 51, BF16 and FP16 1,513 with sparsity
    r"H100 PCIe": (51, 756.5, 756.5),
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: FP32 67, BF16 and FP16 1,979 with sparsity
    r"H200( SXM)?": (67, 989.5, 989.5),
    # NVIDIA L40S datasheet: FP32 91.6, BF16 and FP16 362.05 (733 with sparsity)
    r"L40S": (91.6, 362.05, 362.05),
    # NVIDIA A10 Tensor Core GPU datasheet: FP32 31.2, BF16 and FP16 125
    r"A10": (31.2, 125, 125),
    # NVIDIA V100 Tensor Core GPU datasheet: SXM2 FP32 15.7, FP16 125; PCIe 14 and 112; no BF16
    r"V100-SXM2-(16|32)GB": (15.7, None, 125),
    r"V100-PCIE-(16|32)GB": (14, None, 112),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: FP32 82.6, BF16 and FP16 with FP32
    # accumulation 165.2
    r"(GeForce )?RTX 4090": (82.6, 165.2, 165.2),
}
_DTYPES = ("float32", "bfloat16", "float16")


def environment() -> dict:
    """Returns a JSON-ready description of this process's machine, software and command.

    Call it in the process that measures: with a GPU it initialises CUDA, after which a process
    must not fork.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),  # as typed, nothing expanded
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "triton": _version("triton"),
        "driver": _driver(),
        **_torch(),
        **git_state(),
    }


def git_state(folder: str | Path | None = None) -> dict:
    """Returns `git_commit` and `git_dirty` of the source in `folder` (default: of this file).

    Both are None without git, outside a repository, before a first commit, and for an installed
    copy that merely lies inside somebody else's repository. Of untracked files only Python
    sources make a tree dirty: results are untracked too.
    """
    folder = Path(__file__).parent if folder is None else Path(folder)
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files", "--", "."):
        return {"git_commit": None, "git_dirty": None}
    changes = _git(folder, "status", "--porcelain", "--untracked-files=all")
    if changes is None:
        return {"git_commit": commit, "git_dirty": None}
    lines = [line.rstrip('"') for line in changes.splitlines()]  # git quotes unusual names
    dirty = any(line.endswith(".py") or not line.startswith("??") for line in lines)
    return {"git_commit": commit, "git_dirty": dirty}


def peak_flops(device_name: str, dtype) -> float | None:
    """Returns the dense peak in FLOP/s of a GPU as `torch.cuda.get_device_name` calls it.

    `dtype` is a torch dtype or its name, float32 (TF32 off), bfloat16 or float16. None when the
    device or the dtype is not in the table: MFU is then left blank, never guessed.
    """
    name = re.sub(r"^(NVIDIA|Tesla) ", "", device_name)
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype_name not in _DTYPES:
        return None
    for pattern, peaks in _PEAKS.items():
        if re.fullmatch(pattern, name):
            peak = peaks[_DTYPES.index(dtype_name)]
            return None if peak is None else peak * _TERA
    return None


def _torch() -> dict:
    """Describes PyTorch and the GPUs that it sees."""
    try:
        import torch
    except ImportError:
        return {"torch": None, "cuda": None, "nccl": None, "gpus": []}
    has_gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else None,
        "gpus": [_gpu(torch, index) for index in range(torch.cuda.device_count())],
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _gpu(torch, index: int) -> dict:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory_mb": round(properties.total_memory / 2**20)}


def _cpu_model() -> str | None:
    """Returns the processor's name as Linux gives it, elsewhere as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or None


def _usable_cores() -> int | None:
    """Returns how many cores this process may run on: a container or a launcher can limit them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _driver() -> str | None:
    """Returns the NVIDIA driver's version from the kernel: `nvidia-smi` would take a second."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    """Returns an installed package's version without importing it (Triton's import is slow)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command, or None if there is no git or it fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
