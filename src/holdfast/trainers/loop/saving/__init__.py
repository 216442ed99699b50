"""The checkpoints of the loop trainer.

`saver` decides when and under which name, `saver_group` is what several savers share, `folder` a place they go to,
`restart` and `load` the way back, `uploads` a copy elsewhere.
"""
