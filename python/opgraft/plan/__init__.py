"""Launch plans: hits that C++ replays with no Python.

An override that is registered with `launch_plan=True` declares its impl a pure function of its
arguments' metadata. Then what the impl does for one kind of call (allocations, kernel launches,
calls of other ops) is recorded, and done again by the router for every later call of that kind:
:mod:`opgraft.plan.plans` keeps the plans of an override, :mod:`opgraft.plan.recording` makes one,
`csrc/plan.h` replays it, :mod:`opgraft.plan.warm` records ahead of time.

Packs are registered by `import torch`: what is for recording alone is imported by the first one.
"""
