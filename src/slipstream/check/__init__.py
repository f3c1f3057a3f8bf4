"""Proof that speculation changed nothing: exact laws, experiments, planted bugs, a report."""
