"""The loop of the loop trainer.

`loop` goes through epochs and batches, `steps` trains on a batch, `evaluator` and `metrics` measure, `parallel`,
`ranks` and `precision` say where and how the model computes.
"""
