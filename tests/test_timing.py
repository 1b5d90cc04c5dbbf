"""How rivals take turns, with a timer that measures nothing."""

from __future__ import annotations

from triton_overlap.timing import Call, Sample, Timing, slowest, take_turns


def test_timing_of_samples() -> None:
    found = Timing.of([Sample(3.0, 0.3), Sample(1.0, 0.1), Sample(2.0, 0.2)])
    assert found == Timing(median_ms=2.0, min_ms=1.0, max_ms=3.0, host_median_ms=0.2)


def test_the_slowest_rank_counts() -> None:
    def timing(median: float) -> Timing:
        return Timing(median, median, median, 0.0)

    found = slowest([{"a": timing(1.0), "b": timing(5.0)}, {"a": timing(2.0), "b": timing(3.0)}])
    assert found == {"a": timing(2.0), "b": timing(5.0)}


def test_rivals_take_turns_on_changing_inputs() -> None:
    log: list[tuple[str, int]] = []

    def call(name: str) -> Call:
        return lambda index: log.append((name, index))

    def timer(call: Call, index: int) -> Sample:
        call(index)
        return Sample(float(len(log)), 0.0)

    names = ["a", "b", "c"]
    timings = take_turns({name: call(name) for name in names}, timer=timer, num_sets=4, rounds=6, warmup=2, seed=1)
    assert len(log) == 3 * (6 + 2)
    turns = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert all(sorted(name for name, _ in turn) == names for turn in turns)
    assert len({tuple(name for name, _ in turn) for turn in turns}) > 1
    assert [index for _, index in log] == [i % 4 for i in range(24)]
    # The two warm-up rounds, whose samples are 1 to 6, do not count.
    assert min(timing.min_ms for timing in timings.values()) == 7.0
