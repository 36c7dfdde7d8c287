"""WebDataset: stages that read shards through a cache, and archives faster than its own.

The room uses `cache` and the rooms below it.
"""

from shardcache.wds.attach import attach, url_opener
from shardcache.wds.gopen import register
from shardcache.wds.tar import tar_files, tar_samples

__all__ = ["attach", "register", "tar_files", "tar_samples", "url_opener"]
