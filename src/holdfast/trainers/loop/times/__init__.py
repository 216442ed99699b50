"""Amounts of training as pure values.

`time`, `timestamp`, when something is due (`intervals`), and schedules of the learning rate (`schedulers`).
"""
