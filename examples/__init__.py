"""Programs and files to copy. Tests start the S3 server of `demo`."""
