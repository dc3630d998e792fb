"""The `coldblock` command: one subcommand is one module, imported when it is called.

Owns: the list of subcommands. Does not know: their settings or what they do.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys

from .settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE

COMMANDS = {
    "serve": ("tools.serve", "serve a model over HTTP: one engine and its frontends"),
    "engine": ("engine_core.main", "run the engine-core process alone"),
    "frontend": ("frontend.main", "run an HTTP frontend for running engines"),
    "chat": ("tools.chat", "chat with a running engine in the terminal"),
    "top": ("tools.top.main", "watch a running engine: tiers, requests, swaps"),
    "demo": ("tools.demo", "two answers, one small pool: see a swap happen"),
    "fetch-model": ("tools.fetch_model", "fetch a known model into the cache"),
    "validate": ("tools.validate", "hold this GPU's kernels against their references"),
    "eval": ("tools.eval_kv", "what each KV format costs a model's quality: eval kv MODEL"),
    "bench": ("tools.bench.main", "benchmarks: serve, swap, jitter, monitor, kernels; compare two reports"),
}
EXIT_CODES = "0 done, 1 failed, 2 wrong usage, 3 no engine reachable, 130 interrupted"


def usage() -> str:
    """The text of `coldblock --help`."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: coldblock COMMAND [ARGUMENTS]      coldblock COMMAND --help      coldblock --version",
        "",
        "An LLM server for GPUs too small for their load: cold KV blocks swap to CPU memory, in plain sight.",
        "",
        *(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "Start with:  coldblock serve smollm2-135m",
        "Every flag is also a variable (COLDBLOCK_KV_CACHE_DTYPE) and a key of a --config file; the flag wins.",
        f"Exit codes: {EXIT_CODES}.",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit code (see `EXIT_CODES`)."""
    argv = sys.argv[1:] if argv is None else argv
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `2>&-`: the next file opened must not take its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # what an encoding such as latin-1 lacks is no reason to stop
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return EXIT_OK if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        from . import __version__

        print(f"coldblock {__version__}")
        return EXIT_OK
    if argv[0] not in COMMANDS:
        print(f"coldblock: no command {argv[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        module = importlib.import_module(f".{COMMANDS[argv[0]][0]}", __package__)
        return int(module.main(argv[1:]))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return EXIT_FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f": {error.filename}" if error.filename else ""  # none for what was printed
        print(f"coldblock {argv[0]}: {error.strerror}{where}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
