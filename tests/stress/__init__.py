"""What `make test` has no time for: many processes, many faults, many moments, real waits.

`make stress` runs it in a quarter of an hour, `make stress-full` for as long as you like.
"""
