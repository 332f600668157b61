"""The layers and cells under the names of the papers: each is a generic one with a rule, and takes its coefficients."""
