"""Random access to the samples of WebDataset shards, and exact resume of an epoch.

    index      the offsets of the samples of a shard, and the index file of a data set
    dataset    `TarDataset`, a map-style data set: any sample by its number
    mixture    `Mixture`, which takes samples of several data sets in proportion to weights
    order      the order of the samples of an epoch: a function of seed, epoch and position
    pipeline   WebDataset pipelines that resume exactly: `Cache.attach(resume=True)`; imports torch
    sampler    `ShardBatchSampler`, which gives the samples of an epoch to the ranks; imports torch

The shards stay plain tar archives. The first process that needs a shard finds the offsets of its
samples in the headers of the archive, and writes them into the shard's entry in the cache.
"""
