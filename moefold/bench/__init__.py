"""Timings of kernels, layers, steps, checkpoints and this machine: one file a subject of `moefold bench`."""
