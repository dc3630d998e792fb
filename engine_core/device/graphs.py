"""Decode passes as CUDA graphs, one for each number of rows.

Owns: capture and replay. Does not know: what a pass does; it is a function of the number of rows that launches the same
kernels on the same memory every time.

A pass runs once without a graph before it is captured, so that its kernels are loaded; that run counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class DecodeGraphs:
    """Call with a number of rows and the pass: it runs on the current stream, from its second time on as a graph."""

    def __init__(self) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, rows: int, run: Callable[[int], None]) -> None:
        graph = self._graphs.get(rows)
        if graph is not None:
            graph.replay()
            return
        run(rows)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._memory, capture_error_mode="thread_local")
        try:
            run(rows)
        finally:
            graph.capture_end()
        self._graphs[rows] = graph
