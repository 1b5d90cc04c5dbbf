"""Benchmarks: ``python -m triton_overlap.bench --help``.

    ranks.py        a rank's process group and timer, and the rate of the link, for all benchmarks
    problems.py     which layers are measured
    rivals.py       what is compared: the library by every method, the GEMM alone, a collective and a GEMM, PyTorch's
                    async-TP
    results.py      the data that is kept, as JSON, its tables and figure
    tp.py           one rank of the tensor-parallel benchmark, and of the measurement of a table for method ``auto``
    ep_problems.py, ep_rivals.py, ep_results.py, ep.py   the same for expert parallelism: dispatch and combine, against
                    all-to-all collectives, and by how channels are cut into puts

In the package itself, since ``triton_overlap.tune`` measures with them as well:

    problems.py     inputs and references; one object serves the check and the timing of a problem
    timing.py       how one call is timed, and calls in turns
    environment.py  hardware, versions, commit, clocks

Needs the extra ``bench``.
"""
