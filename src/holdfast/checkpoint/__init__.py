"""L3: finished checkpoints as values: handle, catalog of a run, retention, run index, lease.

Imports storage and format below it and the standard library, never torch: the writer process and the command line
run on this package. The one door upwards is `Checkpoint.load` (and the dict forms), which imports
`holdfast.checkpointer` when it is called.
"""
