"""``ub_cfgs``: defaults, and for each key what is taken, what is refused and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from triton_overlap.comm.gemm_configs import APPLICABLE, GEMM_NAMES, KEYS, gemm_configs

#: Of each GEMM the method that TransformerEngine gives it by default.
DEFAULTS = {
    "qkv_fprop": "ring_exchange",
    "qkv_dgrad": "bulk",
    "qkv_wgrad": "bulk",
    "proj_fprop": "pipeline",
    "proj_dgrad": "ring_exchange",
    "proj_wgrad": None,
    "fc1_fprop": "ring_exchange",
    "fc1_dgrad": "bulk",
    "fc1_wgrad": "bulk",
    "fc2_fprop": "pipeline",
    "fc2_dgrad": "ring_exchange",
    "fc2_wgrad": None,
}
OPTIONS = {"aggregate": True, "use_ce": False, "num_sm": 4, "num_splits": 3}
#: Keys that change nothing, and a value of each.
HARMLESS = {
    "cga_size": 2,
    "set_sm_margin": True,
    "comm_priority": -1,
    "gemm_priority": 0,
    "pipeline_rs_overlap_first_gemm": True,
    "atomic_gemm": False,
    "fp8_buf": 0,
}


@pytest.mark.parametrize("nothing", (None, {}, [{}], {"fc1_fprop": {}}), ids=str)
def test_defaults(nothing: Any) -> None:
    configs = gemm_configs(nothing)
    assert {name: config.method for name, config in configs.items()} == DEFAULTS
    assert all(config.is_default and config.name == name for name, config in configs.items())
    assert all(getattr(config, option) is None for config in configs.values() for option in OPTIONS)


@pytest.mark.parametrize("name", GEMM_NAMES)
def test_methods_that_apply(name: str) -> None:
    for method in APPLICABLE[name]:
        config = gemm_configs({name: {"method": method}})[name]
        assert (config.method, config.is_default) == (method, False)
    for method in {"bulk", "pipeline", "ring_exchange", "fused", "nccl", "auto"} - set(APPLICABLE[name]):
        with pytest.raises(ValueError, match=f"'{method}' does not apply") as caught:
            gemm_configs({name: {"method": method}})
        assert f"methods that apply to {name}: {', '.join(APPLICABLE[name])}" in str(caught.value) or (
            f"{name} exchanges nothing" in str(caught.value)
        )


@pytest.mark.parametrize("key, value", OPTIONS.items())
def test_options_are_kept(key: str, value: Any) -> None:
    configs = gemm_configs({"fc2_fprop": {key: value}})
    assert getattr(configs["fc2_fprop"], key) == value
    assert getattr(configs["fc1_fprop"], key) is None
    assert configs["fc2_fprop"].is_default, "the method stays the default one"


@pytest.mark.parametrize("key, value", HARMLESS.items())
def test_keys_without_effect_change_nothing(key: str, value: Any) -> None:
    assert gemm_configs({"qkv_fprop": {key: value}}) == gemm_configs(None)


def test_every_key_is_tested() -> None:
    assert set(KEYS) == {"method", *OPTIONS, *HARMLESS}


@pytest.mark.parametrize("key", ("atomic_gemm", "fp8_buf"))
def test_harmful_switches_are_refused_with_a_reason(key: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"ub_cfgs\['fc2_fprop'\]\['{key}'\] must be False: .*leave the key"):
        gemm_configs({"fc2_fprop": {key: True}})


@pytest.mark.parametrize("name", GEMM_NAMES)
def test_external_is_refused_with_reason_and_remedy(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"another GEMM's communicator.*{name}"):
        gemm_configs({name: {"method": "external"}})


@pytest.mark.parametrize("key", ("num_sm", "cga_size", "num_splits"))
def test_numbers_have_a_least_value(key: str) -> None:
    with pytest.raises(ValueError, match=rf"ub_cfgs\['qkv_dgrad'\]\['{key}'\] must be at least 1, got 0"):
        gemm_configs({"qkv_dgrad": {key: 0}})


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", (None, "4", 1.0, [True]), ids=repr)
def test_values_of_another_type(key: str, value: Any) -> None:
    expected = "a str|one of fused" if key == "method" else "a whole number|True or False"
    with pytest.raises((TypeError, ValueError), match=rf"ub_cfgs\['proj_fprop'\]\['{key}'\] must be ({expected})"):
        gemm_configs({"proj_fprop": {key: value}})


@pytest.mark.parametrize("key", [key for key in KEYS if key in (*OPTIONS, *HARMLESS)])
def test_numbers_are_no_switches_and_switches_no_numbers(key: str) -> None:
    wrong = True if key in ("num_sm", "cga_size", "num_splits", "comm_priority", "gemm_priority") else 2
    with pytest.raises((TypeError, ValueError), match=f"must be .*got {wrong}"):
        gemm_configs({"proj_fprop": {key: wrong}})


@pytest.mark.parametrize(
    "ub_cfgs, error, words",
    [
        ({"qkv": {}}, ValueError, "unknown GEMM 'qkv'; known: qkv_fprop, qkv_dgrad"),
        ({"qkv_fprop": {"sm": 4}}, ValueError, "unknown key 'sm'; known: method, num_sm"),
        ({"qkv_fprop": {"method": "ring"}}, ValueError, "one of fused, ring_exchange, pipeline, bulk, .*got 'ring'"),
        ({"qkv_fprop": "bulk"}, TypeError, "must be a mapping of keys to values, got 'bulk'"),
        ("bulk", TypeError, "must be None or a mapping, got 'bulk'"),
        ([{}, {}], TypeError, "must be None or a mapping"),
        (
            {"qkv_dgrad": {"method": "pipeline"}, "qkv_wgrad": {}},
            ValueError,
            "qkv_wgrad cannot be configured beside qkv_dgrad with method 'pipeline'.*the method \"bulk\"",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(ub_cfgs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gemm_configs(ub_cfgs)
