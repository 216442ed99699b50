"""What is on a local disk goes elsewhere, whatever becomes of the trainer.

`queue` is the one queue; its sources are the checkpoints of a mirrored run (`mirror`), saves of ranks that share no
disk (`staged_run`), and checkpoints and files that a trainer names (`files`). Start with `queue`.
"""
