"""Many processes, one cache, every fault at once; afterwards a judge reads what all wrote down."""
