"""What may be stored, and what goes first.

    budget     room for a newcomer: one number under the budget lock
    eviction   which shards go first, which stay, and removing them
    pins       what users keep
    memory     what a filesystem and the cgroups leave
    tiers      one directory of a cache: namespaces, session, budget
    clean      making room on request, and beside a job

Uses the store, the locks, and `stats.database`.
"""
