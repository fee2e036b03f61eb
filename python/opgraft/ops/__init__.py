"""Ops as torch declares them: schemas, dispatch keys, and what a call of one is given."""
