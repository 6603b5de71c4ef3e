"""The fixtures of `programs`, for all tests of this folder."""

from __future__ import annotations

from programs import make_runtime, programs

__all__ = ["make_runtime", "programs"]
