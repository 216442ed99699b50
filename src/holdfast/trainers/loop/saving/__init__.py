"""The checkpoints of the loop trainer.

`saver` decides when to save and under which name. It hands the state to its `async_saver` (copy, run session);
`post_commit` follows what is durable (link, upload, retention). `saver_context` is what all savers of a trainer know,
`saver_group` what they do together, `folder` where they save. `restart` and `load` are the way back, `uploads` a copy
elsewhere. Each of them knows only those it is made of: group -> savers -> (async_saver, post_commit) -> folder.
"""
