"""Exact attention over a shared prompt: one copy of the prompt's keys and values serves all of its responses."""

from ._version import __version__
from .interface import flash_attn_dualkv_varlen_func, flash_attn_varlen_func
from .ops import build_info

__all__ = ["__version__", "build_info", "flash_attn_dualkv_varlen_func", "flash_attn_varlen_func"]
