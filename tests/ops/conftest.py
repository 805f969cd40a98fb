from __future__ import annotations

import pytest

from outrider.ops.native_kernels import Kernels, load_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    found = load_kernels()
    if found is None:
        pytest.skip("no C++ compiler")
    return found
