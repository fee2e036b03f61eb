"""Ops as torch declares them: schemas, dispatch keys, calls and their arguments."""
