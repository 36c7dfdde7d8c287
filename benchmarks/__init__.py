"""Benchmarks of shardcache and its peers: medians over interleaved rounds, and ratios."""
