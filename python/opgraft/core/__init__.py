"""The compiled core: finding it, building it, and whether one may be trusted."""
