"""A process killed before and behind every system call, and every call failing; under strace."""
