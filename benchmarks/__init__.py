"""Benchmarks of Holdfast against the limits of the machine and its peers; `make bench` runs all of them."""
