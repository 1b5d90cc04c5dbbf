"""Marks of whole models, and of modules whose parameters a wrapper replaces, as bodies for rank processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import triton_overlap as to
from tests.ops.cases import assert_close, assert_equal

_MARKS = ("tensor_parallel_dim", "tensor_parallel_parts", "sequence_parallel")


def _model(group: to.Group, *, experts: bool) -> nn.ModuleList:
    """A gated feed-forward layer, a norm that the library does not know, and perhaps experts."""
    ranks = group.world_size
    shared: dict[str, Any] = {"group": group, "activation": "swiglu"}
    torch.manual_seed(6)
    model = nn.ModuleList(
        [
            to.nn.LayerNormMLP(16, 4 * ranks, max_tokens=4 * ranks, sequence_parallel=True, **shared),
            nn.RMSNorm(16, device=group.device),
        ]
    )
    if experts:
        model.append(to.nn.MoE(16, 8, 2 * ranks, 1, num_max_tokens_per_rank=4, shared_ffn_hidden_size=4, **shared))
    to.nn.mark_sequence_parallel(model[1])
    return model


def _marks(model: nn.Module) -> dict[str, list[Any]]:
    return {name: [getattr(p, mark, None) for mark in _MARKS] for name, p in model.named_parameters()}


def _gradients(model: nn.ModuleList, x: Tensor, group: to.Group) -> dict[str, Tensor]:
    """Complete ones; the same ``x`` on all ranks that share a shard, whose mean a wrapper takes."""
    for layer in model:
        x = x + layer(x)
    x.square().sum().backward()
    to.nn.all_reduce_replicated_gradients(model, group)
    return {name: _whole(p.grad) for name, p in model.named_parameters()}


def _whole(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach()


def _draw(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, (to.nn.Linear, to.nn.MoE)):
            part.reset_parameters()


def fully_sharded(tensor_parallel: int) -> None:
    """``fully_shard`` beside tensor parallelism: sums of gradients, state dicts, marks and initial values are those of
    the model before, though all of its parameters are other ones now.

    Args:
        tensor_parallel: ranks of a group; the others of the world shard its parameters.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, world_size = dist.get_rank(), dist.get_world_size()
    tp_groups = [dist.new_group(range(s, s + tensor_parallel)) for s in range(0, world_size, tensor_parallel)]
    dp_groups = [dist.new_group(range(s, world_size, tensor_parallel)) for s in range(tensor_parallel)]
    group = to.init_group(tp_groups[rank // tensor_parallel], timeout_s=60)
    try:
        plain = _model(group, experts=True)
        model = copy.deepcopy(plain)
        mesh = DeviceMesh.from_group(dp_groups[rank % tensor_parallel], group.device.type)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        torch.manual_seed(group.rank)
        x = torch.randn(4, 16, device=group.device)
        expected, found = _gradients(plain, x, group), _gradients(model, x, group)
        for name, gradient in expected.items():
            assert_close(f"gradient of {name}", found[name], gradient, torch.float32)
        full = to.nn.gather_state_dict(plain, group)
        for name, tensor in to.nn.gather_state_dict(model, group).items():
            assert_equal(name, tensor, full[name])
        mine = to.nn.shard_state_dict(full, model, group)
        assert {name: x.shape for name, x in mine.items()} == {name: x.shape for name, x in plain.state_dict().items()}
        to.nn.mark_parameters(model)
        assert _marks(model) == _marks(plain)
        for each in (plain, model):
            torch.manual_seed(7)
            _draw(each)
        for (name, parameter), drawn in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert_equal(f"initial {name}", _whole(drawn), parameter.detach())
    finally:
        group.close()


def marked_whole(group: to.Group) -> None:
    """``mark_sequence_parallel`` of a model leaves the layers in it that are split alone: gradients are those of one
    process, also in a copy. A mark on a split parameter is refused."""
    torch.manual_seed(6)
    middle = 4 * group.world_size
    plain = nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, middle), nn.Tanh(), nn.Linear(middle, 8), nn.Linear(8, 8), nn.RMSNorm(8)
    ).to(group.device)
    model = copy.deepcopy(plain)
    shared: dict[str, Any] = {"group": group, "max_tokens": 2 * group.world_size}
    for index, kind in ((1, to.nn.ColumnParallelLinear), (3, to.nn.RowParallelLinear)):
        linear = plain[index]
        assert isinstance(linear, nn.Linear)
        model[index] = kind.from_linear(linear, **shared)
    model[4] = to.nn.Linear(8, 8, **shared)
    model[4].load_state_dict(plain[4].state_dict())
    to.nn.mark_sequence_parallel(model)
    x = torch.randn(2 * group.world_size, 8, device=group.device)
    plain(x).exp().sum().backward()
    for each in (model, copy.deepcopy(model)):
        each(x.chunk(group.world_size)[group.rank]).exp().sum().backward()
        to.nn.all_reduce_replicated_gradients(each, group)
        for name, parameter in each.named_parameters():
            assert parameter.grad is not None
            expected, dim = plain.get_parameter(name).grad, getattr(parameter, "tensor_parallel_dim", None)
            assert expected is not None
            mine = expected if dim is None else expected.chunk(group.world_size, dim)[group.rank]
            assert_close(f"gradient of {name}", parameter.grad, mine.double(), torch.float32)

    if group.rank == group.world_size - 1:
        model.get_parameter("1.weight").sequence_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"1.weight is marked sequence_parallel, and the ranks split its dimension 0"):
        to.nn.all_reduce_replicated_gradients(model, group)
    weights = nn.Sequential(to.nn.RowParallelLinear(4 * group.world_size, 8, False, **shared), nn.RMSNorm(8))
    nn.utils.parametrizations.weight_norm(weights[0])
    to.nn.mark_sequence_parallel(weights)
    marked = [name for name, parameter in weights.named_parameters() if hasattr(parameter, "sequence_parallel")]
    assert marked == ["1.weight"]


def _replace(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.detach().clone()))


def replaced(group: to.Group) -> None:
    """Parameters that stand in the place of marked ones are taken for what those were."""
    plain = _model(group, experts=False)
    model = copy.deepcopy(plain)
    _replace(model)
    x = torch.randn(4, 16, device=group.device)
    expected = _gradients(plain, x, group)
    for name, gradient in _gradients(model, x, group).items():
        assert_close(f"gradient of {name}", gradient, expected[name], torch.float32)
    assert _marks(model) == _marks(plain)
    full = to.nn.gather_state_dict(plain, group)
    _replace(model)
    for name, tensor in to.nn.gather_state_dict(model, group).items():
        assert_equal(name, tensor, full[name])
    norm = nn.RMSNorm(8, device="meta")
    to.nn.mark_sequence_parallel(norm)
    norm.load_state_dict({"weight": torch.ones(8)}, assign=True)
    to.nn.mark_parameters(norm)
    assert _marks(norm) == {"weight": [None, None, True]}


def parametrized(group: to.Group) -> None:
    """Gradients of what a partial parameter is made from are summed, and converters refuse what is not split as the
    parameter is; without the parametrization everything is as before."""
    plain = _model(group, experts=False)
    model = copy.deepcopy(plain)
    fc1: Any = model[0].fc1
    fc2: Any = plain[0].fc2
    for part, name in ((fc1, "layer_norm_weight"), (fc1, "weight"), (model[1], "weight")):
        parametrizations.weight_norm(part, name)
    x = torch.randn(4, 16, device=group.device)
    expected, found = _gradients(plain, x, group), _gradients(model, x, group)
    # The norms' weights are ones, each of which is its magnitude times its sign.
    for name in ("0.fc1.layer_norm_weight", "1.weight"):
        of, _, own = name.rpartition(".")
        assert_close(name, found[f"{of}.parametrizations.{own}.original0"], expected[name], torch.float32)
    full = to.nn.gather_state_dict(plain, group)
    made = r"nothing says how the ranks split \['0\.fc1\.parametrizations\.weight\.original0', .*original1'\]; remove"
    for convert in (to.nn.gather_state_dict, lambda *args: to.nn.shard_state_dict(full, *args)):
        with pytest.raises(ValueError, match=made):
            convert(model, group)
    for parameter in fc1.parametrizations.weight.parameters():
        parameter.tensor_parallel_dim = 0
        parameter.tensor_parallel_parts = 2
    assert to.nn.gather_state_dict(model, group)["0.fc1.parametrizations.weight.original0"].shape == (
        8 * group.world_size,
        1,
    )
    parametrize.remove_parametrizations(fc1, "weight")
    found = to.nn.gather_state_dict(model, group)
    assert_close("weight", found["0.fc1.weight"], full["0.fc1.weight"], torch.float32)
    prune.l1_unstructured(fc2, "weight", 3)
    with pytest.raises(ValueError, match=r"\['0\.fc2\.weight_mask'\]"):
        to.nn.gather_state_dict(plain, group)
    prune.remove(fc2, "weight")
    assert int((to.nn.gather_state_dict(plain, group)["0.fc2.weight"] == 0).sum()) == 3 * group.world_size
