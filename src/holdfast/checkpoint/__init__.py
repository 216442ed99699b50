"""`Checkpoint`: a finished checkpoint as a value, with the questions about it.

`handle` is the public class, `follow` yields the checkpoints of a run as they are committed, `summary` and `verify`
look inside. Imports run, copying, format and storage, never torch.
The one door upwards is `Checkpoint.load` (and the dict forms), which imports `holdfast.checkpointer` when it is called.
"""
