"""`Checkpoint`: a finished checkpoint as a value, with the questions about it.

`handle` is the public class, `follow` yields the checkpoints of a run as they are committed, `summary` and `verify`
look inside. Imports run, copying, format and storage, never torch.
The only import upwards is in `Checkpoint.load` (and the dict forms), which import `holdfast.checkpointer` when called.
"""
