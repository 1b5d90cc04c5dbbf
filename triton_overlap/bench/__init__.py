"""Benchmarks: ``python -m triton_overlap.bench --help``.

    problems.py     shapes, inputs and references; one object serves the check and the timing of a problem
    rivals.py       what is compared: the library, the GEMM alone, a collective and a GEMM, PyTorch's async-TP
    timing.py       how one call is timed, and rivals in turns
    environment.py  hardware, versions, commit, clocks
    results.py      the data that is kept, as JSON, and its table and figure
    tp.py           one rank of the tensor-parallel benchmark

Needs the extra ``bench``.
"""
