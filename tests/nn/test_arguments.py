"""Arguments of the modules on rank processes and on GPUs."""

from __future__ import annotations

import pytest

from tests.distributed import Ranks
from tests.nn import argument_bodies, conversion_bodies, input_bodies
from tests.ops.cases import Body, on_ranks

BODIES: tuple[Body, ...] = (
    argument_bodies.wrong,
    argument_bodies.different,
    conversion_bodies.wrong_state_dicts,
    conversion_bodies.tied_weights,
    conversion_bodies.wrong_gradients,
    input_bodies.wrong_inputs,
    input_bodies.wrong_main_grads,
    input_bodies.wrong_tables,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_arguments(body: Body) -> None:
    on_ranks(2, body)


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_arguments_on_gpus(body: Body) -> None:
    on_ranks(Ranks(2, "cuda"), body)
