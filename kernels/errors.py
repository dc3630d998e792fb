"""What can go wrong with a kernel.

Owns: the error types. Does not know: which kernel, or who called it.
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of this package."""


class KernelUnavailable(KernelError):
    """There is no device, driver or compiler that this kernel could run with; the text says what is missing."""


class KernelCompileError(KernelError):
    """A kernel's source does not compile; the text is the compiler's log."""


class KernelArgumentError(KernelError, ValueError):
    """An argument a kernel cannot take: the text names it, what it is, and what is allowed."""
