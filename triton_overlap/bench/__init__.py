"""Benchmarks: ``python -m triton_overlap.bench --help``.

    ranks.py        a rank's start and end, its timer, the link to its peers
    session.py      what benchmarks share beside that: calls in turns, errors that stop all ranks, progress, the record
    results.py      the data that is kept, as JSON
    reports/        a module a kind of results: its rows, its tables, its figure
    figures.py      how figures are made
    problems.py     which layers are measured
    rivals.py       what products are compared with: the GEMM alone, a collective and a GEMM, PyTorch's async-TP
    tp.py           products by every method, and the measurement of a table for method ``auto``
    tasks.py        timelines of the fused kernels' tasks
    layer.py        a transformer layer, forward and backward, against NCCL and cuBLAS, and async-TP
    counts.py       one graph of a layer for every token count
    train.py        tokens a second while token counts change
    host.py         host time of a call
    ep.py, ep_problems.py, ep_rivals.py, ep_results.py   expert parallelism: dispatch and combine against all-to-all
                    collectives, and by how channels are cut into puts

In the package itself, since ``triton_overlap.tune`` measures with them as well:

    problems.py     inputs and references; one object serves the check and the timing of a problem
    timing.py       how one call is timed, and calls in turns
    environment.py  hardware, versions, commit, clocks

Needs the extra ``bench``.
"""
