"""A storm over one cache directory, and a judge of what happened in it.

    boss ---> nursery ---fork---> workers ---> cache (small tmpfs) ---> meter ---> SeaweedFS
      | kills, stops, deletes locks,  | every call, begun and ended
      | overwrites, fills the disk    v
      +--------------------------> history ---> judge ---> table, exit status

Shards say in every 4 KiB which name, version and offset they are (`shards`), so that a
wrong byte is named. `judge` and `economy` are pure: a history in, violations out.
"""
