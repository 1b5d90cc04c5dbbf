"""Figures show what they are given."""

from __future__ import annotations

import pytest

from triton_overlap.bench import figures


@pytest.mark.parametrize("log", (False, True))
def test_every_point_is_in_view(log: bool) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="the extra bench has matplotlib")
    axes = figure_module.Figure().subplots()
    points = [(512.0, 2.0), (16384.0, 38.0)]
    figures.lines(axes, {"graph": points, "nothing": []}, log=log)
    (line,) = axes.get_lines()
    assert [tuple(point) for point in line.get_xydata()] == points
    low, high = axes.get_ylim()
    assert low < 2 < 38 < high
    assert low == 0 or log
    # At half the height of a logarithmic axis stands the geometric mean.
    middle = axes.transData.inverted().transform(axes.transAxes.transform((0.5, 0.5)))[1]
    assert middle == pytest.approx((low * high) ** 0.5 if log else (low + high) / 2)
