"""The loop of the loop trainer.

`loop` goes through epochs and batches, `steps` trains on a batch in a precision, `evaluator` and `metrics` measure,
`parallel` and `ranks` say where the model computes.
"""
