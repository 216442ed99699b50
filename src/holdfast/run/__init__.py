"""A run on storage: its lease, its index, the records of its checkpoints, and retention.

Start with `catalog` (list, newest, best, candidates for a resume, deletions) and `lease` (one writer at a time; `fence`
says why that holds for an owner that sleeps; `heartbeat` renews it). `index` is ``run.json``, `record` what it says
about one checkpoint, `reports` the metrics, `candidates` what a start may go on from, `external` what other processes
ask of retention. Imports format and storage, never torch: the writer process and the command line work on this package.
"""
