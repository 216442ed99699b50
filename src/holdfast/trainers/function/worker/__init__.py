"""The worker's side of a run: what train_func calls, and how it travels to the driver."""
