"""The data side of training.

The order of samples (`order`), where training is in it (`batches`), and randomness kept apart from that of the
model (`seeding`, `loaders`).
"""
