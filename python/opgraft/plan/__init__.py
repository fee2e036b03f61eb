"""Launch plans: hits that C++ replays with no Python.

An override that is registered with `launch_plan=True` declares that its impl is a pure function of
its arguments' metadata. What the impl does for a call (allocations, kernel launches, calls of other
ops) is recorded once per key. The router replays it for every later call with the same key.
:mod:`opgraft.plan.plans` holds the plans of an override, :mod:`opgraft.plan.recording` records one,
`csrc/plan.h` replays it, and :mod:`opgraft.plan.warm` records ahead of time.

`import torch` registers packs, so modules that only recording needs are imported by the first
recording.
"""
