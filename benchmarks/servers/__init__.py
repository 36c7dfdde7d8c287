"""Servers that the benchmarks download from."""
