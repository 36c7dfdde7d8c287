"""Random access to the samples of WebDataset shards, through a cache.

    index      the offsets of the samples of a shard, and the index file of a data set
    dataset    `TarDataset`, a map-style data set: any sample by its number

The shards stay plain tar archives. The first process that needs a shard finds the offsets of its
samples in the headers of the archive, and writes them into the shard's entry in the cache.
"""

from shardcache.dataset.dataset import TarDataset

__all__ = ["TarDataset"]
