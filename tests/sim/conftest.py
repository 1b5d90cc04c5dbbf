"""What the simulator's tests share."""

from __future__ import annotations

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not isinstance(tl.cdiv, InterpretedFunction):
        pytest.skip("the simulator needs Triton's interpreter: set TRITON_INTERPRET=1")
