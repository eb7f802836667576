"""Spans as NVTX ranges, so that Nsight Systems shows our names over its kernels."""

from __future__ import annotations

import os

import torch

from redline.telemetry.spans import Span, use_span_class


class NvtxSpan(Span):
    """A span that NVIDIA's tools see too."""

    __slots__ = ()

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)
        super().__enter__()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        torch.cuda.nvtx.range_pop()


def started_by_nsight() -> bool:
    """Nsight Systems says so to the processes that it starts."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


def show_spans(on: bool) -> None:
    """Spans that open from now on are ranges, or no longer are."""
    use_span_class(NvtxSpan if on else Span)
