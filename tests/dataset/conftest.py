"""A fixture for data sets."""

import pytest

from shardcache import TarDataset
from shardcache.dataset.index import write_index_file


@pytest.fixture
def indexed(tmp_path):
    """Make data sets of index files, whose shards need not exist."""

    def indexed(cache, name, counts):
        urls = [f"s3://{name}/{number}.tar" for number in range(len(counts))]
        write_index_file(index := tmp_path / f"{name}.json", dict(zip(urls, counts, strict=True)))
        return TarDataset(index, cache=cache)

    return indexed
