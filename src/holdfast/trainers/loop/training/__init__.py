"""The loop of the loop trainer.

`loop` goes through epochs and batches, `steps` makes one, `evaluator` and `metrics` measure, `parallel`, `ranks` and
`precision` say where and how the model computes.
"""
