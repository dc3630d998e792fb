"""Compiling, caching and launching kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from coldblock.kernels import fused, loader
from coldblock.kernels.checks import check_multiple, check_number, check_tensor
from coldblock.kernels.errors import KernelArgumentError, KernelCompileError, KernelError, KernelUnavailable
from coldblock.kernels.pages import KVPages

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is missing")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coldblock" / "kernels"


@needs_nvrtc
def test_a_compiled_kernel_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = loader.compile_cubin("silu_multiply", {}, "sm_80")
    assert cubin.startswith(b"\x7fELF")
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(loader, "_compile", lambda *_: pytest.fail("compiled again"))
    assert loader.compile_cubin("silu_multiply", {}, "sm_80") == cubin


SIGNAL_ACTIONS_AROUND_A_COMPILATION = """
import ctypes, signal
from coldblock.kernels import loader

class Action(ctypes.Structure):  # struct sigaction, as glibc has it on 64-bit machines
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint64 * 16), ("flags", ctypes.c_int)]

def actions():
    libc, memory = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    action = Action.from_buffer(memory)
    return [
        (number, action.handler, action.flags & ~0x04000000)  # without SA_RESTORER, which is glibc's own
        for number in signal.valid_signals()
        if libc.sigaction(int(number), None, memory) == 0
    ]

before = actions()
loader.compile_cubin("silu_multiply", {}, "sm_80")
kept = loader._signal_actions_kept
kept.__enter__()  # as if a thread compiled
signal.siginterrupt(signal.SIGINT, False)
kept.__enter__()  # and another began
kept.__exit__()
kept.__exit__()
changed = [pair for pair in zip(before, actions()) if pair[0] != pair[1]]
assert len(before) > 30 and not changed, changed
"""


@needs_nvrtc
def test_compiling_leaves_signals_as_they_are(cache: Path) -> None:
    """With SA_RESTART on SIGINT, Ctrl-C would not wake a main thread that waits for a lock. NVRTC sets it once a
    process, so this takes a new one."""
    process = subprocess.run(
        [sys.executable, "-c", SIGNAL_ACTIONS_AROUND_A_COMPILATION], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert len(list(cache.iterdir())) == 1


@needs_nvrtc
@pytest.mark.parametrize(
    "damage", [lambda content: content[:-100], lambda content: b"", lambda content: content + b"x"]
)
def test_a_damaged_cache_file_is_compiled_again(cache: Path, damage) -> None:
    cubin = loader.compile_cubin("silu_multiply", {}, "sm_80")
    (file,) = cache.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert loader.compile_cubin("silu_multiply", {}, "sm_80") == cubin
    assert loader._read(file) == cubin


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "coldblock").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loader.compile_cubin("silu_multiply", {}, "sm_80").startswith(b"\x7fELF")


@needs_nvrtc
def test_no_home_folder_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(loader.Path, "home", homeless)
    assert loader.compile_cubin("silu_multiply", {}, "sm_80").startswith(b"\x7fELF")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(loader.os, "replace", full_disk)
    loader._write(tmp_path / "x.cubin", b"cubin")
    assert not list(tmp_path.iterdir())


@needs_nvrtc
def test_the_cache_tells_macros_architectures_and_sources_apart(cache: Path) -> None:
    for macros, architecture in [({}, "sm_80"), ({"ACTIVATION_BF16": 1}, "sm_80"), ({}, "sm_90a")]:
        loader.compile_cubin("silu_multiply", macros, architecture)
    assert len(list(cache.iterdir())) == 3


@needs_nvrtc
@pytest.mark.parametrize(("header", "cubins"), [("common.cuh", 2), ("of_a_header.cuh", 2), ("of_nobody.cuh", 1)])
def test_what_a_changed_header_is_part_of_is_compiled_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, cubins: int
) -> None:
    sources = tmp_path / "cuda"
    sources.mkdir()
    for name in ("silu_multiply.cu", "common.cuh"):
        (sources / name).write_bytes((loader.SOURCES / name).read_bytes())
    for name, text in (
        ("common.cuh", '\n#include "of_a_header.cuh"\n'),
        ("of_a_header.cuh", ""),
        ("of_nobody.cuh", ""),
    ):
        with open(sources / name, "a") as file:
            file.write(text)
    monkeypatch.setattr(loader, "SOURCES", sources)
    loader.compile_cubin("silu_multiply", {}, "sm_80")
    with open(sources / header, "a") as file:
        file.write("// another line\n")
    loader.compile_cubin("silu_multiply", {}, "sm_80")
    assert len(list(cache.iterdir())) == cubins


@needs_nvrtc
def test_a_compile_error_carries_the_log_and_what_was_compiled(cache: Path) -> None:
    with pytest.raises(KernelCompileError, match=r"silu_multiply\.cu .*sm_86.*-DActivation=4(.|\n)*error"):
        loader.compile_cubin("silu_multiply", {"Activation": 4}, "sm_86")
    assert not cache.exists()


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    loader._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    with pytest.raises(KernelUnavailable, match="extra cuda12 or cuda13"):
        loader.compile_cubin("silu_multiply", {}, "sm_80")
    loader._nvrtc.cache_clear()


@needs_nvrtc
def test_headers_of_another_cuda_version_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loader.header_folders()
    loader.header_folders.cache_clear()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").touch()
    (tmp_path / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  11080\n")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert loader.header_folders() == found
    loader.header_folders.cache_clear()


@pytest.mark.parametrize(
    ("device", "architecture"),
    [(80, "sm_80"), (86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100"), (103, "sm_100"),
     (120, "sm_120"), (121, "sm_120"), (75, None), (110, None)],
)  # fmt: skip
def test_the_newest_architecture_that_runs_is_chosen(
    device: int, architecture: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "device_capability", lambda: divmod(device, 10))
    if architecture is None:
        with pytest.raises(KernelUnavailable, match=r"there are kernels for 8\.0, 8\.6, 8\.9, 9\.0, 10\.0, 12\.0"):
            loader.device_architecture()
    else:
        assert loader.device_architecture() == architecture


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_device_loading_says_so() -> None:
    with pytest.raises(KernelUnavailable, match="no CUDA device"):
        loader.load("silu_multiply")


def test_arguments_lie_as_a_c_struct() -> None:
    class Wanted(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_void_p), ("c", ctypes.c_float), ("d", ctypes.c_int),
                    ("e", ctypes.c_void_p))  # fmt: skip

    tensor = torch.zeros(3)
    buffer = loader._ArgumentBuffer("kernel", [7, tensor, 1.5, 9, None])
    pointers = buffer.fill([8, tensor, 2, -9, None])
    values = Wanted.from_address(pointers[0])
    assert (values.a, values.b, values.c, values.d, values.e) == (8, tensor.data_ptr(), 2.0, -9, None)
    begin = pointers[0]
    assert [pointer - begin for pointer in pointers] == [getattr(Wanted, name).offset for name in "abcde"]


def test_a_struct_is_passed_by_value() -> None:
    content = struct.pack("4d", 1, 2, 3, 4)
    buffer = loader._ArgumentBuffer("kernel", [1, content])
    pointers = buffer.fill([1, content])
    assert ctypes.string_at(pointers[1], len(content)) == content


@pytest.mark.parametrize("arguments", [[1.5, 2], [1, torch.zeros(1)], [1], [1 << 40, 2], [1, 2, 3]])
def test_arguments_of_another_kind_than_at_first_are_refused(arguments: list) -> None:
    buffer = loader._ArgumentBuffer("kernel", [1, 2])
    with pytest.raises(KernelArgumentError, match="kernel"):
        buffer.fill(arguments)


def test_an_argument_of_no_known_kind_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="no tensor"):
        loader._ArgumentBuffer("kernel", ["text"])  # type: ignore[list-item]


def test_variants_are_all_combinations() -> None:
    found = loader.variants("x", A=(0, 1), B=(2, 3, 4))
    assert len(found) == 6
    assert {(v.macros["A"], v.macros["B"]) for v in found} == {(a, b) for a in (0, 1) for b in (2, 3, 4)}
    assert loader.variants("x", ("sm_90a",)) == (loader.Variant("x", {}, ("sm_90a",)),)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), r"x is torch\.float64; allowed: torch\.float16, torch\.bfloat16"),
        (torch.zeros(2, 9, dtype=torch.float16), r"x has shape \[2, 9\]; wanted: \[T, N=8\]"),
        (torch.zeros(16, dtype=torch.float16), r"x has shape \[16\]; wanted: \[T, N=8\]"),
        (torch.zeros(2, 16, dtype=torch.float16)[:, ::2], "x is not contiguous"),
        (torch.zeros(17, dtype=torch.float16)[1:].view(2, 8), "no multiple of 16 bytes"),
        (torch.zeros(2, 8, dtype=torch.float16), "x is on cpu"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        check_tensor("x", tensor, (torch.float16, torch.bfloat16), [("T", None), ("N", 8)])


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match="head_dim is 65; allowed: 64, 96"):
        check_number("head_dim", 65, (64, 96))
    with pytest.raises(KernelArgumentError, match="N is 12; allowed: multiples of 8 up to 64"):
        check_multiple("N", 12, 8, most=64)
    check_multiple("N", 64, 8, most=64)


def test_pages_of_an_unknown_kind_are_refused() -> None:
    pool = torch.zeros(3, 2 * 2 * 16 * 64 * 2, dtype=torch.uint8)
    KVPages(pool, "fp16", 16, 1, 2, 64)
    with pytest.raises(KernelArgumentError, match="KV format is fp32"):
        KVPages(pool, "fp32", 16, 1, 2, 64)  # type: ignore[arg-type]
    with pytest.raises(KernelArgumentError, match="head_dim is 80"):
        KVPages(pool, "fp16", 16, 1, 2, 80)
    with pytest.raises(KernelArgumentError, match="block_size is 24"):
        KVPages(pool, "fp16", 24, 1, 2, 64)
    with pytest.raises(KernelArgumentError, match="num_layers is 0; allowed: from 1 on"):
        KVPages(pool, "fp16", 16, 0, 2, 64)
    with pytest.raises(KernelArgumentError, match="num_kv_heads is -1"):
        KVPages(pool, "fp16", 16, 1, -1, 64)
    with pytest.raises(KernelArgumentError, match="pool has shape"):
        KVPages(pool, "int8", 16, 1, 2, 64)


@pytest.mark.parametrize(
    ("kibibytes", "blocks", "static", "dynamic", "percent"),
    [
        (228, 1, 35024, 0, 16),
        (228, 2, 35024, 0, 31),
        (228, 2, 26272, 8752, 31),
        (100, 1, 35024, 0, 36),
        (100, 3, 35024, 0, 100),
    ],
)
def test_what_blocks_do_not_need_is_left_to_the_l1_cache(
    monkeypatch: pytest.MonkeyPatch, kibibytes: int, blocks: int, static: int, dynamic: int, percent: int
) -> None:
    class Kernel:
        attributes: ClassVar = {"shared_size_bytes": static}
        asked: ClassVar[list[int]] = []

        def __setattr__(self, name: str, value: int) -> None:
            assert name == "preferred_shared_memory_carveout"
            self.asked.append(value)

    properties = SimpleNamespace(shared_memory_per_multiprocessor=kibibytes << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    function = object.__new__(loader.Function)
    function._kernel, function._device, function._resident_blocks = Kernel(), 0, 0
    for _ in range(3):
        function.prefer_l1(blocks, dynamic)
    assert Kernel.asked == [percent]
    assert percent == 100 or percent * (kibibytes << 10) >= 100 * blocks * (static + dynamic + 1024)


@pytest.mark.gpu
def test_the_driver_takes_the_division_of_memory() -> None:
    function = loader.Function("silu_multiply", {"ACTIVATION_BF16": 0})
    function.prefer_l1(4)
    share = function.attribute("preferred_shared_memory_carveout")
    assert 1 <= share <= 10


@pytest.mark.gpu
def test_any_thread_may_launch() -> None:
    gate_up = torch.randn(64, 256, device="cuda", dtype=torch.float16)
    outs = [torch.full((64, 128), torch.nan, device="cuda", dtype=torch.float16) for _ in range(8)]
    failures: list[BaseException] = []

    def work(out: torch.Tensor) -> None:
        try:
            for _ in range(200):
                fused.silu_multiply(gate_up, out)
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not outs[0].isnan().any()


@pytest.mark.gpu
def test_a_refused_launch_says_why() -> None:
    x = torch.zeros(8, 16, device="cuda", dtype=torch.float16)
    with pytest.raises(KernelError, match=r"silu_multiply: launch failed, CUDA error 1 \(invalid argument\)"):
        loader.load("silu_multiply", ACTIVATION_BF16=0).launch([1], 2048, [x, x, 1])


@pytest.mark.gpu
def test_launches_go_to_the_current_stream() -> None:
    gate_up = torch.randn(4, 64, device="cuda", dtype=torch.float16)
    outs = [torch.zeros(4, 32, device="cuda", dtype=torch.float16) for _ in range(2)]
    fused.silu_multiply(gate_up, outs[1])
    zero = outs[0].clone().cpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        fused.silu_multiply(gate_up, outs[0])
    assert torch.equal(outs[0].cpu(), zero)  # on the default stream, which does not wait
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.gpu
def test_a_kernel_is_loaded_once() -> None:
    assert loader.load("silu_multiply", ACTIVATION_BF16=0) is loader.load("silu_multiply", ACTIVATION_BF16=0)
    assert loader.load("silu_multiply", ACTIVATION_BF16=0).attribute("num_regs") > 0


def test_a_driver_that_fails_at_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA driver initialization failed\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(KernelUnavailable, match="cannot be used: CUDA driver initialization failed; `nvidia-smi`"):
        loader._require_device.__wrapped__()
