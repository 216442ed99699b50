"""L3: the writer, which turns shared memory into committed checkpoints beside the trainer.

`arena` is the shared memory, `messages` what is said about it, `client` the trainer's end. `process` and `loop` are
the other end (a process of its own, or a thread where memory or storage cannot be shared), `pipeline` the digesting
and writing, `run` the lease, index and retention of a run.

May import holdfast.checkpoint, holdfast.format, holdfast.storage, config and errors; never torch, so that the
process starts in about 0.03 s. Keep this module free of imports for the same reason.
"""
