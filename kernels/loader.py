"""From a CUDA source file to something that can be launched.

Owns: compilation (NVRTC, to cubin), the cache of cubins on disk, launching on torch's current stream.
Does not know: what a kernel computes, or what its arguments mean.

A kernel is one `extern "C"` function in one file of `cuda/`; its variants are macros. A cubin is cached by everything
that shapes it: source, headers of `cuda/`, macros, architecture, compiler version. Compiling needs no GPU.

On SM90 and later every launch may begin before the kernel in front of it has ended (programmatic dependent launch): a
kernel first fetches what depends on nobody, such as weights, then calls `wait_for_previous_kernel()` of `common.cuh`
before it touches anything else. Every kernel here must call it, in every block.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import signal
import struct
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import KernelArgumentError, KernelCompileError, KernelError, KernelUnavailable

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""What every kernel compiles for; "a" adds the instructions of that one generation (wgmma)."""

_INSTALL = "install coldblock with the extra cuda12 or cuda13 (in a checkout: make install CUDA=cuda12)"
_HEADER_PACKAGES = ("nvidia.cu13", "nvidia.cuda_runtime", "nvidia.cuda_cccl")
_SHARED_WITHOUT_ASKING = 48 * 1024
_SHARED_PER_BLOCK = 1024  # that CUDA itself takes
_DIGEST_BYTES = 32

_LAUNCH_CONFIG = struct.Struct("7IPPI")  # CUlaunchConfig: grid, block, shared bytes; stream, attributes; their number
_LAUNCH_ATTRIBUTE = struct.Struct("i4xi60x")  # CUlaunchAttribute: an id, and a union of 64 bytes
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SIGACTION_MOST_BYTES = 256  # struct sigaction has 152 bytes in glibc on 64-bit machines

Macros = Mapping[str, str | int]
Argument = Tensor | int | float | bytes | None


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
    folder = _cache_folder()
    if folder is None:
        return _compile(nvrtc, file, options)
    cached = folder / f"{source}-{architecture}-{_digest(file, options, nvrtc.getVersion())}.cubin"
    cubin = _read(cached)
    if cubin is None:
        cubin = _compile(nvrtc, file, options)
        _write(cached, cubin)
    return cubin


class Function:
    """A kernel loaded on torch's current device. Any thread may launch it; a CUDA graph can capture the launch."""

    def __init__(self, source: str, macros: Macros) -> None:
        self.name = source
        cubin = compile_cubin(source, macros, device_architecture())
        import cupy

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            self._kernel = cupy.RawModule(path=file.name).get_function(source)
            self._handle = ctypes.c_void_p(self._kernel.kernel.ptr)
        self._device = torch.cuda.current_device()
        self._shared_limit = _SHARED_WITHOUT_ASKING - self.attribute("shared_size_bytes")
        self._resident_blocks = 0
        self._attribute_memory = _launch_attributes()
        self._attributes = (
            ctypes.addressof(self._attribute_memory),
            len(self._attribute_memory) // _LAUNCH_ATTRIBUTE.size,
        )
        self._config = ctypes.create_string_buffer(_LAUNCH_CONFIG.size)
        self._configured: tuple[int, ...] = ()
        self._arguments: _ArgumentBuffer | None = None
        self._lock = threading.Lock()  # over the two buffers
        self._launch = driver().cuLaunchKernelEx

    def attribute(self, name: str) -> int:
        """A function attribute as CuPy names it, e.g. "num_regs"."""
        return int(self._kernel.attributes[name])

    def prefer_l1(self, resident_blocks: int, shared_bytes: int = 0) -> None:
        """Leave to the L1 cache what that many blocks of a multiprocessor do not need, with `shared_bytes` of dynamic
        shared memory each, at every launch.

        Changes no result. For kernels that wait for many loads from global memory.
        """
        # Loads under way need lines of the L1 cache, and a multiprocessor keeps its division of memory until a kernel
        # asks for another: on an H200, decode attention (fp16, 32 x 8192 tokens) takes 77 us after a kernel that uses
        # much shared memory, and 58 us if it asks for no more than it needs.
        if resident_blocks != self._resident_blocks:
            needed = resident_blocks * (self.attribute("shared_size_bytes") + shared_bytes + _SHARED_PER_BLOCK)
            whole = torch.cuda.get_device_properties(self._device).shared_memory_per_multiprocessor
            self._kernel.preferred_shared_memory_carveout = min(100, -(-100 * needed // whole))  # rounded up to a size
            self._resident_blocks = resident_blocks

    def shared_room(self, resident_blocks: int) -> int:
        """Bytes of dynamic shared memory that so many blocks of a multiprocessor may have each."""
        whole = torch.cuda.get_device_properties(self._device).shared_memory_per_multiprocessor
        return whole // resident_blocks - _SHARED_PER_BLOCK - self.attribute("shared_size_bytes")

    def launch(
        self, grid: Sequence[int], block: Sequence[int] | int, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Tensors are passed as pointers (None is a null pointer), ints as 32-bit ints, floats as 32-bit floats,
        bytes as a struct by value.

        The kinds of the arguments are those of the first launch. Raises KernelError when the driver refuses.
        """
        x, y, z = (*grid, 1, 1)[:3]
        if not (x and y and z):  # nothing to compute
            return
        if shared_bytes > self._shared_limit:
            self._kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_limit = shared_bytes
        bx, by, bz = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            if self._arguments is None:
                self._arguments = _ArgumentBuffer(self.name, arguments)
            pointers = self._arguments.fill(arguments)
            self._configure((x, y, z, bx, by, bz, shared_bytes, stream))
            code = self._launch(self._config, self._handle, pointers, None)
            if code == _INVALID_CONTEXT:  # the thread's first contact with the device
                self._use_device()
                code = self._launch(self._config, self._handle, pointers, None)
        if code:
            raise KernelError(
                f"{self.name}: launch failed, {error_text(code)}; grid {tuple(grid)}, block {block}, "
                f"{shared_bytes} bytes of shared memory"
            )

    def _configure(self, config: tuple[int, ...]) -> None:
        if config != self._configured:
            _LAUNCH_CONFIG.pack_into(self._config, 0, *config, *self._attributes)
            self._configured = config

    def _use_device(self) -> None:
        import cupy

        cupy.cuda.runtime.setDevice(self._device)


class _ArgumentBuffer:
    """A kernel's arguments in memory, as C lays out a struct of them, and their addresses, as the driver wants them."""

    def __init__(self, name: str, arguments: Sequence[Argument]) -> None:
        codes = [_struct_code(name, argument) for argument in arguments]
        self._name, self._layout = name, struct.Struct("".join(codes))
        self._memory = ctypes.create_string_buffer(max(1, self._layout.size))
        begin = ctypes.addressof(self._memory)
        ends = [struct.calcsize("".join(codes[: i + 1])) for i in range(len(codes))]
        places = [begin + end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._pointers = (ctypes.c_void_p * len(places))(*places)

    def fill(self, arguments: Sequence[Argument]) -> Any:
        """Write the values; the pointers to them."""
        values = [x.data_ptr() if type(x) is Tensor else x or 0 for x in arguments]
        try:
            self._layout.pack_into(self._memory, 0, *values)
        except (struct.error, TypeError) as error:
            kinds = self._layout.format
            raise KernelArgumentError(f"{self._name}: {error}; the first launch had arguments '{kinds}'") from error
        return self._pointers


def _struct_code(name: str, argument: Argument) -> str:
    if argument is None or type(argument) is Tensor:
        return "P"
    if isinstance(argument, float):
        return "f"
    if isinstance(argument, int):
        return "i"
    if isinstance(argument, bytes):
        return f"{len(argument)}s"
    raise KernelArgumentError(f"{name}: {argument!r} is no tensor, int, float, bytes or None")


@functools.cache
def _load(device: int, source: str, **macros: str | int) -> Function:
    return Function(source, macros)


def load(source: str, **macros: str | int) -> Function:
    """The kernel `cuda/<source>.cu`, whose entry point has the file's name, with these macros; loaded once a device."""
    _require_device()
    return _load(torch._C._cuda_getDevice(), source, **macros)


@functools.cache
def _require_device() -> None:
    if not torch.cuda.is_available():
        raise KernelUnavailable(
            "torch sees no CUDA device: `nvidia-smi` must list one, and CUDA_VISIBLE_DEVICES let it through"
        )
    try:
        torch.cuda.init()
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
        raise KernelUnavailable(f"the CUDA device cannot be used: {problem}; `nvidia-smi` may say more") from error


def device_capability() -> tuple[int, int]:
    """Compute capability of torch's current device."""
    _require_device()
    return _capability(torch._C._cuda_getDevice())


@functools.cache  # torch takes 20 us to tell, and wrappers ask for each launch
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device_architecture() -> str:
    """The architecture to compile for: the newest of ARCHITECTURES that the current device runs.

    Raises KernelUnavailable without a device, and for one that runs none of them.
    """
    return _architecture(*device_capability())


@functools.cache
def _architecture(major: int, minor: int) -> str:
    fitting = [name for name in ARCHITECTURES if _runs_on(name, 10 * major + minor)]
    if not fitting:
        known = ", ".join(f"{number // 10}.{number % 10}" for number in map(_number, ARCHITECTURES))
        raise KernelUnavailable(
            f"the device has compute capability {major}.{minor}; there are kernels for {known} and what is compatible"
        )
    return fitting[-1]


def _runs_on(architecture: str, device: int) -> bool:
    """A cubin runs on its own major version from its minor version on; one with "a" on exactly its own."""
    number = _number(architecture)
    if architecture.endswith("a"):
        return number == device
    return number // 10 == device // 10 and number <= device


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("a"))


def _launch_attributes() -> Any:
    if device_capability() < (9, 0):
        return ctypes.create_string_buffer(0)
    return ctypes.create_string_buffer(
        _LAUNCH_ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1), _LAUNCH_ATTRIBUTE.size
    )


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver."""
    return ctypes.CDLL("libcuda.so.1")


def error_text(code: int) -> str:
    """What the driver's answer means."""
    text = ctypes.c_char_p()
    driver().cuGetErrorString(code, ctypes.byref(text))
    return f"CUDA error {code} ({(text.value or b'unknown').decode()})"


@functools.cache
def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise KernelUnavailable(f"CuPy is missing: {_INSTALL}") from error
    except RuntimeError as error:
        raise KernelUnavailable(f"CUDA's run-time compiler NVRTC is missing: {_INSTALL}") from error
    return nvrtc


def _compile(nvrtc: Any, file: Path, options: Sequence[str]) -> bytes:
    program = nvrtc.createProgram(file.read_text(encoding="utf-8"), file.name, (), ())
    try:
        with _signal_actions_kept:
            nvrtc.compileProgram(program, options)
        cubin: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        said = " ".join(option for option in options if not option.startswith("-I"))
        raise KernelCompileError(f"{file.name} {said}: {nvrtc.getProgramLog(program).strip(chr(0))}") from error
    finally:
        nvrtc.destroyProgram(program)
    return cubin


class _SignalActionsKept:
    """While anybody is inside, signal actions may change; when the last one leaves, they are what they were.

    A process's first use of NVRTC leaves SIGINT and SIGTERM with SA_RESTART: from then on neither would wake a main
    thread that waits for a lock. Python's `signal` restores no flags, and works in the main thread alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._sigaction = ctypes.CDLL(None).sigaction
        self._actions = {int(n): ctypes.create_string_buffer(_SIGACTION_MOST_BYTES) for n in signal.valid_signals()}

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                for number, action in self._actions.items():
                    self._sigaction(number, None, action)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for number, action in self._actions.items():  # refused, without harm, where nobody can set one
                    self._sigaction(number, action, None)


_signal_actions_kept = _SignalActionsKept()


def _options(macros: Macros, architecture: str) -> tuple[str, ...]:
    defines = [f"-D{name}={value}" for name, value in sorted(macros.items())]
    includes = [f"-I{folder}" for folder in (SOURCES, *header_folders())]
    return (f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *defines, *includes)


@functools.cache
def header_folders() -> tuple[Path, ...]:
    """Where the headers (cuda_fp16.h) of the compiler's version are: CUDA_PATH, pip's packages, /usr/local/cuda.

    Raises KernelUnavailable when the compiler or its headers are missing.
    """
    candidates = [Path(os.environ["CUDA_PATH"]) / "include"] if "CUDA_PATH" in os.environ else []
    for name in _HEADER_PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        candidates += [Path(place) / "include" for place in (found.submodule_search_locations or ())] if found else []
    candidates.append(Path("/usr/local/cuda/include"))
    wanted = _nvrtc().getVersion()[0]
    toolkit = next((folder for folder in candidates if _cuda_version(folder) == wanted), None)
    if toolkit is None:
        raise KernelUnavailable(f"the headers of CUDA {wanted} are not found: {_INSTALL}, or set CUDA_PATH")
    # CCCL is a package of its own in CUDA 12.
    return (toolkit, *[folder for folder in candidates if "cuda_cccl" in folder.parts and folder.is_dir()])


def _cuda_version(headers: Path) -> int | None:
    """The major version of the toolkit whose headers these are."""
    try:
        text = (headers / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    return int(found[1]) // 1000 if found and (headers / "cuda_fp16.h").exists() else None


def _digest(file: Path, options: Sequence[str], version: object) -> str:
    digest = hashlib.sha256(repr((version, [o for o in options if not o.startswith("-I")])).encode())
    for part in _with_headers(file):
        digest.update(part.read_bytes())
    return digest.hexdigest()[:24]


def _with_headers(file: Path) -> list[Path]:
    """A source and those of our headers that it includes, by themselves or by others."""
    found = [file]
    for part in found:
        for name in re.findall(r'#include "(.+)"', part.read_text(encoding="utf-8")):
            if (header := file.parent / name) not in found:
                found.append(header)
    return found


def _cache_folder() -> Path | None:
    """None for a user who has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldblock" / "kernels"
    except RuntimeError:
        return None


def _read(path: Path) -> bytes | None:
    """What `_write` wrote there, or None: a damaged file is as good as none."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    """Atomically, as several processes may compile the same kernel; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
