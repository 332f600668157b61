"""Solvers, one family a file; :func:`hbnode.odeint` picks one by its method's name."""
