"""The data side of training.

The order of samples (`order`, `split`), where training is in it (`batches`, `position`), and randomness kept apart from
that of the model (`seeding`, `worker_seeds`).
"""
