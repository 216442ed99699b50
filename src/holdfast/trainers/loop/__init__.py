"""The loop trainer, in the manner of MosaicML Composer: it owns the loop, and the engine below saves and restores it.

Start with `trainer`; `training` is the loop, `saving/` its checkpoints, `time` amounts of training. Public names
come from `holdfast` (`Trainer`), `holdfast.core`, `holdfast.callbacks` and `holdfast.loggers`; nothing below this
folder imports it.
"""
