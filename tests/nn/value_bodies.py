"""Values and gradients of the transformer modules, as bodies for every backend (``tests.ops.cases``)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import triton_overlap as to
from tests.nn.cases import Case, Draw, assert_module_close, gradients_of, mine
from tests.nn.parallel import Parallel
from tests.ops.cases import assert_equal, assert_steady, counters


def linear(
    group: to.Group,
    case: Case,
    dtype: torch.dtype,
    mode: str | None,
    flags: Mapping[str, bool],
    normalization: str | None = None,
) -> None:
    """``Linear``, or ``LayerNormLinear`` with a ``normalization``, against plain modules in one process."""
    shape = case.shape
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(shape.hidden, shape.ffn))
    if normalization:
        plain.insert(0, getattr(nn, normalization)(shape.hidden, eps=1e-5))
        for parameter in plain[0].parameters():
            nn.init.normal_(parameter, mean=1.0, std=0.2)
    plain = plain.to(device=group.device, dtype=dtype)
    exact = copy.deepcopy(plain).double()

    shared = case.shared(group, dtype)
    settings = {name: shared[name] for name in ("group", "max_tokens", "params_dtype", "sequence_parallel")}
    settings.update(flags)
    if normalization:
        settings["normalization"] = normalization
    kind = to.nn.LayerNormLinear if normalization else to.nn.Linear
    layer = kind(shape.hidden, shape.ffn, parallel_mode=mode, **settings)

    norm_names = {"0.weight": "layer_norm_weight", "0.bias": "layer_norm_bias", "1.weight": "weight", "1.bias": "bias"}
    names = norm_names if normalization else {"0.weight": "weight", "0.bias": "bias"}

    def shard(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of tensors of the plain modules, under the layer's names."""
        return to.nn.shard_state_dict({names[name]: x for name, x in tensors.items()}, layer, group)

    layer.load_state_dict(shard(plain.state_dict()))
    split_in, split_out = case.sequence_parallel and mode != "row", case.sequence_parallel and mode != "column"
    for seed, tokens in enumerate(case.counts(group)):
        draw = Draw(group, dtype, seed)
        x, d_out = draw(tokens, shape.hidden), draw(tokens, shape.ffn)

        def own(full: Tensor, split_tokens: bool, split_features: bool) -> Tensor:
            rows = mine(full, group) if split_tokens else full
            return mine(rows, group, 1) if split_features else rows

        own_x = own(x, split_in, mode == "row").clone().requires_grad_()
        out = layer(own_x)
        out.backward(own(d_out, split_out, mode == "column"))
        to.nn.all_reduce_replicated_gradients(layer, group)
        single_x, exact_x = x.clone().requires_grad_(), x.double().requires_grad_()
        single_out, exact_out = plain(single_x), exact(exact_x)
        single_out.backward(d_out)
        exact_out.backward(d_out.double())
        assert single_x.grad is not None
        assert exact_x.grad is not None
        for what, actual, single, exact64, is_split, has_features in (
            ("output", out, single_out, exact_out, split_out, mode == "column"),
            ("dx", own_x.grad, single_x.grad, exact_x.grad, split_in, mode == "row"),
        ):
            expected = [own(x, is_split, has_features) for x in (single, exact64)]
            assert_module_close(what, actual, expected[0], expected[1], dtype)
        single_grads, exact_grads = (shard(gradients_of(m)) for m in (plain, exact))
        for name, grad in gradients_of(layer).items():
            assert_module_close(f"gradient of {name}", grad, single_grads[name], exact_grads[name], dtype)
        for module in (layer, plain, exact):
            module.zero_grad()


def blocks(group: to.Group, case: Case, dtype: torch.dtype, part: str) -> None:
    """Output, input gradient and every parameter gradient at every count, against plain blocks in one process.

    After the first count no kernel is specialised anew and no symmetric memory allocated.
    """
    parallel = Parallel(group, case, dtype, part)
    steady: dict[str, int] = {}
    for seed, tokens in enumerate(case.counts(group)):
        x, d_out, cu_seqlens = parallel.inputs(tokens, seed)
        own_x = parallel.own(x).clone().requires_grad_()
        out = parallel(own_x, cu_seqlens)
        out.backward(parallel.own(d_out))
        grads = parallel.gradients()
        steady = steady or counters()

        results = []
        for modules, wide in ((parallel.plain, dtype), (parallel.exact, torch.float64)):
            full_x = x.detach().to(wide, copy=True).requires_grad_()
            full_out = parallel.plain_forward(modules, full_x, cu_seqlens)
            full_out.backward(d_out.to(wide))
            assert full_x.grad is not None
            results.append((parallel.own(full_out), parallel.own(full_x.grad), parallel.expected_gradients(modules)))
        (single_out, single_dx, single_grads), (exact_out, exact_dx, exact_grads) = results
        what = f"{part}, {tokens} tokens"
        assert_module_close(f"{what}: output", out, single_out, exact_out, dtype)
        assert_module_close(f"{what}: dx", own_x.grad, single_dx, exact_dx, dtype)
        assert set(grads) == set(exact_grads)
        for name, grad in grads.items():
            assert_module_close(f"{what}: gradient of {name}", grad, single_grads[name], exact_grads[name], dtype)
        if not case.sequence_parallel:
            for other in group.all_gather_object(out.detach().cpu()):
                assert_equal("output on another rank", out.detach().cpu(), other)
    assert_steady("after the first count", steady)
