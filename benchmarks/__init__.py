"""Benchmarks that time alternatives side by side and print ratios, for example ``python -m benchmarks.core``."""
