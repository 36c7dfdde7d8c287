"""WebDataset's ways in: the opener, and a tar walk that is faster than its own.

Others import `attach`, `url_opener`, `register`, `tar_files` and `tar_samples`. The room uses
`cache` and what lies below it.
"""

from shardcache.wds.attach import attach, url_opener
from shardcache.wds.gopen import register
from shardcache.wds.tar import tar_files, tar_samples

__all__ = ["attach", "register", "tar_files", "tar_samples", "url_opener"]
