"""Amounts of training as pure values.

`time`, `timestamp` with when something is due, and schedules of the learning rate (`schedulers`).
"""
