"""Benchmarks: every peer in the same run, medians over interleaved repeats, ratios."""
