"""Experiments that reproduce the papers, run from a checkout: ``python -m tasks`` lists them."""
