"""Crossovers: from where on an override is faster than native, as measured data.

An author declares on what it depends (:class:`Crossover`); a table says it for a model of device;
what follows from it is a grid that the router looks up. Nothing here measures: docs/tuning.md.
"""

from opgraft.crossover.declaration import Crossover

__all__ = ["Crossover"]
