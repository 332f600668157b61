"""Data sets: one module for each."""
