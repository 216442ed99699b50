"""What is on a local disk goes to the remote.

Whole checkpoints of a mirrored run (`mirror`), and parts of ranks that share no disk (`staged_part`, `staged_run`).
`plan` decides, `remote` does one step at a time.
"""
