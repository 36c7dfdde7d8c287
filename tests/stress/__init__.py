"""Tests that are too long for `make test`: see `make stress` and `make stress-full`."""
