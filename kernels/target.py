"""What a kernel may rely on: the capability of the hardware and compiler it is built for.

A variant is chosen by what the target can do (matrix units, shared memory, warp width, Triton
version), never by the name of a GPU.  A target that we have not met gets the portable variants.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import torch

from .launch import triton


@dataclasses.dataclass(frozen=True)
class Target:
    """The hardware and compiler that a kernel is built for.

    ``backend``: ``"cuda"``, ``"hip"`` or ``"cpu"`` (no Triton kernel runs there outside the
    interpreter).  ``arch``: ``"sm_90"``, ``"gfx942"`` or ``"cpu"``.  ``shared_memory``: bytes that one
    program may use.  ``warp_size``: threads.  ``num_processors``: multiprocessors or compute units.
    ``triton_version``: ``(major, minor)``, ``(0, 0)`` where Triton is not installed.
    """

    backend: str
    arch: str
    shared_memory: int
    warp_size: int
    num_processors: int
    triton_version: tuple[int, int]

    @property
    def capability(self) -> int:
        """CUDA compute capability as one number (90 for 9.0); 0 for other backends."""
        return int(self.arch.removeprefix("sm_")) if self.backend == "cuda" else 0


# Per architecture: shared memory of one program in bytes, warp width, processors.  The processor count
# is a typical part's: it only matters where no device is at hand (`explain` on a laptop).
# Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD CDNA and RDNA
# ISA documents.
_ARCHITECTURES = {
    "sm_80": (163 * 1024, 32, 108),
    "sm_86": (99 * 1024, 32, 84),
    "sm_89": (99 * 1024, 32, 128),
    "sm_90": (227 * 1024, 32, 132),
    "sm_100": (227 * 1024, 32, 148),
    "sm_120": (99 * 1024, 32, 170),
    "gfx90a": (64 * 1024, 64, 104),
    "gfx942": (64 * 1024, 64, 304),
    "gfx950": (160 * 1024, 64, 256),
    "gfx1100": (64 * 1024, 32, 96),
}

DEFAULT_ARCH = "sm_90"
"""The target that decisions are made for where there is no GPU and none is named."""


@functools.cache
def triton_version() -> tuple[int, int]:
    """``(major, minor)`` of the installed Triton, ``(0, 0)`` if there is none."""
    if triton is None:
        return (0, 0)
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def named_target(arch: str) -> Target:
    """The target called ``arch`` (``"sm_90"``, ``"gfx942"``, ``"cpu"``), without asking any device.

    Raises ValueError for a name that is neither ``sm_NN`` nor ``gfxNNN`` nor ``cpu``.
    """
    if arch == "cpu":
        return Target("cpu", "cpu", 0, 0, 0, triton_version())
    if not re.fullmatch(r"sm_\d{2,3}|gfx[0-9a-f]{3,4}", arch):
        known = ", ".join([*_ARCHITECTURES, "cpu"])
        raise ValueError(f"target {arch!r} is not an architecture; use one of {known}")
    backend = "cuda" if arch.startswith("sm_") else "hip"
    # An unknown member of either family is assumed to be no better than its family's smallest.
    fallback = (99 * 1024, 32, 84) if backend == "cuda" else (64 * 1024, 64, 96)
    shared_memory, warp_size, num_processors = _ARCHITECTURES.get(arch, fallback)
    return Target(backend, arch, shared_memory, warp_size, num_processors, triton_version())


@functools.cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        backend, arch = "hip", properties.gcnArchName.split(":")[0]
    else:
        backend, arch = "cuda", f"sm_{properties.major}{properties.minor}"
    return dataclasses.replace(
        named_target(arch),
        backend=backend,
        warp_size=properties.warp_size,
        num_processors=properties.multi_processor_count,
    )


def device_target(device: torch.device) -> Target:
    """The target of a device that is present; ``cpu`` for everything that is not a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return named_target("cpu")
    return _gpu_target(torch.cuda.current_device() if device.index is None else device.index)
