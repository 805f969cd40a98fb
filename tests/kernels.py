"""For tests of the compiled kernels: skipped, and said so, where no compiler builds them."""

from __future__ import annotations

import pytest

from outrider.ops.native_kernels import load_kernels

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")
