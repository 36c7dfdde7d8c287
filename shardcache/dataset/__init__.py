"""Read any sample of WebDataset shards at any time, and resume an epoch exactly."""
