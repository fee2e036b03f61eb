"""Copies that change the dtype."""
