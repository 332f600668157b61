"""What the tasks share: options, run folders, training, sweeps, files."""
