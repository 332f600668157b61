"""Layers and cells under the names of the papers: generic ones that take the coefficients of a rule in its place."""
