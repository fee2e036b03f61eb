"""The compiled core: finding it, building it, and whether it can be trusted."""
