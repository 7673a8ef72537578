"""Benchmarks beside stock Inductor: ``python -m benchmarks NAME``; see ``python -m benchmarks --help``."""
