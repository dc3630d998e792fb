"""What the tools that run kernels need of this machine's GPU, and what goes wrong on it in a user's words.

Owns: the check and the errors. Does not know: which kernels a tool runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..kernels import loader
from ..kernels.errors import KernelError
from .errors import ToolError


def require_gpu() -> str:
    """The GPU's name. Raises ToolError where no kernel can be compiled and run, and says what is missing."""
    if torch.version.cuda is None:
        raise ToolError(f"kernels need a CUDA device and a torch built for it; this torch is {torch.__version__}")
    with explained():
        loader.device_architecture()
        loader.header_folders()
    return torch.cuda.get_device_name()


@contextmanager
def explained() -> Iterator[None]:
    """Errors of kernels, and memory that does not suffice, as ToolError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ToolError("the GPU has too little free memory; end what else uses it (`nvidia-smi` lists it)") from error
    except KernelError as error:
        raise ToolError(str(error)) from error
