"""Symmetric memory, signals and groups. Knows no GEMM and no experts; README.md beside this has the protocol."""
