"""The writer, which turns shared memory into committed checkpoints beside the trainer.

`arena` is the shared memory, `messages` what is said about it, `client` the trainer's end. Start with `server`, the
other end (in a process of its own, or in a thread where memory or storage cannot be shared); `save` is one save from
job to commit, `pipeline` its digesting and writing, `open_run` the lease, index and retention of a run. `ranks/` agree,
`uploads/` bring what was committed to a remote, `ingest/` takes foreign files in; `distributed` puts ranks together.

May import copying, run, format, storage, config and errors; never torch, so that the process starts in about 0.03 s.
Keep this module free of imports for the same reason.
"""
