"""Kernels and their launchers, one operation a file. Knows device functions and layouts, never a backend."""
