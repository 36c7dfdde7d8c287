"""origins."""
