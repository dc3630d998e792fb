"""From a CUDA source file to something that can be launched.

Owns: compilation (NVRTC, to cubin), the cache of cubins on disk, launching on torch's current stream.
Does not know: what a kernel computes, or what its arguments mean.

A kernel is one `extern "C"` function in one file of `cuda/`; its variants are macros. A cubin is cached by everything
that shapes it: source, headers of `cuda/`, macros, architecture, compiler version. Compiling needs no GPU.

On SM90 and later every launch may begin before the kernel in front of it has ended (programmatic dependent launch): a
kernel first fetches what depends on nobody, such as weights, then calls `wait_for_previous_kernel()` of `common.cuh`
before it touches anything else. Every kernel here must call it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import KernelCompileError, KernelError, KernelUnavailable

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""What every kernel compiles for; "a" adds the instructions of that one generation (wgmma)."""

_HEADER_PACKAGES = ("nvidia.cu13", "nvidia.cuda_runtime", "nvidia.cuda_cccl")
_LARGEST_STATIC_SHARED = 48 * 1024
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

Macros = Mapping[str, str | int]


@dataclass(frozen=True)
class Variant:
    """One form of a kernel that its wrapper may ask `load` for, and the architectures it may ask on."""

    source: str
    macros: Macros
    architectures: tuple[str, ...] = ARCHITECTURES


def variants(
    source: str, architectures: tuple[str, ...] = ARCHITECTURES, **choices: Iterable[str | int]
) -> tuple[Variant, ...]:
    """All combinations of the macros' values. A wrapper module lists those it asks for as its constant VARIANTS."""
    names = sorted(choices)
    combinations = itertools.product(*(choices[name] for name in names))
    return tuple(Variant(source, dict(zip(names, values, strict=True)), architectures) for values in combinations)


def compile_cubin(source: str, macros: Macros, architecture: str) -> bytes:
    """The cubin of `cuda/<source>.cu`, from the cache or NVRTC. Raises KernelCompileError and KernelUnavailable."""
    nvrtc = _nvrtc()
    file = SOURCES / f"{source}.cu"
    options = _options(macros, architecture)
    cached = _cache_folder() / f"{source}-{architecture}-{_digest(file, options, nvrtc.getVersion())}.cubin"
    if cached.exists():
        return cached.read_bytes()
    program = nvrtc.createProgram(file.read_text(encoding="utf-8"), file.name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise KernelCompileError(f"{file.name} {dict(macros)} {architecture}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    _write(cached, cubin)
    return cubin


class Function:
    """A loaded kernel. Calls go to torch's current stream and can be captured in a CUDA graph."""

    def __init__(self, source: str, macros: Macros) -> None:
        self.name = source
        cubin = compile_cubin(source, macros, device_architecture())
        try:
            import cupy
        except ImportError as error:
            raise KernelUnavailable("CuPy is missing: install coldblock with the extra cuda12 or cuda13") from error
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            self._kernel = cupy.RawModule(path=file.name).get_function(source)
            self._handle = ctypes.c_void_p(self._kernel.kernel.ptr)
        self._shared_limit = _LARGEST_STATIC_SHARED
        self._attributes = _launch_attributes()
        self._driver = ctypes.CDLL("libcuda.so.1")

    def attribute(self, name: str) -> int:
        """A function attribute as CuPy names it, e.g. "num_regs"."""
        return int(self._kernel.attributes[name])

    def launch(
        self, grid: Sequence[int], block: Sequence[int] | int, arguments: Sequence[Tensor | int | float | bytes | None],
        shared_bytes: int = 0,
    ) -> None:
        """Tensors go as pointers (None is a null pointer), ints and floats as 32-bit numbers, bytes as a struct by value."""
        if shared_bytes > self._shared_limit:
            self._kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_limit = shared_bytes
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        x, y, z = (*grid, 1, 1)[:3]
        bx, by, bz = ((block, 1, 1) if isinstance(block, int) else (*block, 1, 1))[:3]
        stream = torch.cuda.current_stream().cuda_stream
        config = _LaunchConfig(
            x, y, z, bx, by, bz, shared_bytes, stream, ctypes.addressof(self._attributes), len(self._attributes)
        )
        code = self._driver.cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None)
        if code:
            raise KernelError(f"{self.name}: launch failed with CUDA error {code}; grid {grid}, block {block}, "
                              f"{shared_bytes} bytes of shared memory")


@functools.cache
def _load(source: str, macros: tuple[tuple[str, str | int], ...]) -> Function:
    return Function(source, dict(macros))


def load(source: str, **macros: str | int) -> Function:
    """The kernel `cuda/<source>.cu`, whose entry point has the file's name, with these macros; loaded once."""
    return _load(source, tuple(sorted(macros.items())))


@functools.cache
def device_capability() -> tuple[int, int]:
    """Compute capability of torch's current device."""
    if not torch.cuda.is_available():
        raise KernelUnavailable("torch sees no CUDA device")
    return torch.cuda.get_device_capability()


def device_architecture() -> str:
    """The architecture to compile for: the newest of ARCHITECTURES that the current device runs."""
    major, minor = device_capability()
    own = 10 * major + minor
    fitting = [name for name in ARCHITECTURES if _runs_on(name, own)]
    if not fitting:
        raise KernelUnavailable(f"the device has compute capability {major}.{minor}; 8.0 or later is needed")
    return fitting[-1]


def _runs_on(architecture: str, device: int) -> bool:
    """A cubin runs on its own major version from its minor version on; one with "a" on exactly its own."""
    number = int(architecture.removeprefix("sm_").rstrip("a"))
    if architecture.endswith("a"):
        return number == device
    return number // 10 == device // 10 and number <= device


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = [  # noqa: RUF012
        *[(name, ctypes.c_uint) for name in ("x", "y", "z", "bx", "by", "bz", "shared_bytes")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes of which the first int is used here."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]  # noqa: RUF012


def _launch_attributes() -> Any:
    if device_capability() < (9, 0):
        return (_LaunchAttribute * 0)()
    attributes = (_LaunchAttribute * 1)()
    attributes[0].id = _PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[0].value[0] = 1
    return attributes


def _c_value(argument: Tensor | int | float | bytes | None) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, bytes):
        return (ctypes.c_char * len(argument)).from_buffer_copy(argument)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise KernelUnavailable("CuPy is missing: install coldblock with the extra cuda12 or cuda13") from error
    return nvrtc


def _options(macros: Macros, architecture: str) -> tuple[str, ...]:
    folders = [SOURCES, *header_folders()]
    defines = [f"-D{name}={value}" for name, value in sorted(macros.items())]
    includes = [f"-I{folder}" for folder in folders]
    return (f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *defines, *includes)


@functools.cache
def header_folders() -> tuple[Path, ...]:
    """Where the toolkit's headers (cuda_fp16.h) are: CUDA_PATH, pip's packages, /usr/local/cuda."""
    candidates = [Path(os.environ["CUDA_PATH"]) / "include"] if "CUDA_PATH" in os.environ else []
    for name in _HEADER_PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        candidates += [Path(place) / "include" for place in (found.submodule_search_locations or ())] if found else []
    candidates.append(Path("/usr/local/cuda/include"))
    toolkit = next((folder for folder in candidates if (folder / "cuda_fp16.h").exists()), None)
    if toolkit is None:
        raise KernelUnavailable("cuda_fp16.h is not found: install coldblock with the extra cuda12 or cuda13")
    # CCCL is a package of its own in CUDA 12; headers of another toolkit must not mix in.
    return (toolkit, *[folder for folder in candidates if "cuda_cccl" in folder.parts and folder.is_dir()])


def _digest(file: Path, options: Sequence[str], version: object) -> str:
    digest = hashlib.sha256(repr((version, [o for o in options if not o.startswith("-I")])).encode())
    for part in (file, *sorted(SOURCES.glob("*.cuh"))):
        digest.update(part.read_bytes())
    return digest.hexdigest()[:24]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "coldblock" / "kernels"


def _write(path: Path, content: bytes) -> None:
    """Atomically, as several processes may compile the same kernel; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return
