"""Timings that print ratios, measured side by side: ``python -m benchmarks.core``."""
