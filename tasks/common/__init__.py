"""Code that all tasks share: options, run folders, training, sweeps and files."""
