"""The loop trainer, in the manner of MosaicML Composer: it owns the loop, and the engine below saves and restores it.

Start with `trainer`. `training` goes through epochs, batches and steps of a `state`, on the ranks and device of
`parallel`, over the `data`, measured by `evaluator`; `callbacks` and `loggers` are asked at its events, `time` and
`schedulers` say when, `stop_policy` how it is left. `saving/` has its checkpoints. Public names come from `holdfast`
(`Trainer`), `holdfast.core`, `holdfast.callbacks` and `holdfast.loggers`; nothing below this folder imports it.
"""
