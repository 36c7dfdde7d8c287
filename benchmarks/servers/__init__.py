"""What the benchmarks fetch from: S3-shaped servers, slow links, nginx, network namespaces."""
