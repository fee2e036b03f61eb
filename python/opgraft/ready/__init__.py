"""Compiling kernels before a call needs them, in other processes, while native serves.

With `when_not_ready="native"` a call whose kernels are not compiled yet is native's. The router
asks for them once per plan key (`csrc/plan_impl.cpp`), and this room makes them ready:
:mod:`opgraft.ready.readiness` keeps what has become of each key, :mod:`opgraft.ready.pool` runs the
worker processes, :mod:`opgraft.ready.request` says what a worker is told, and
:mod:`opgraft.ready.dry` is what it does: it runs the impl on tensors without memory, and compiles
what the impl launches. What it compiles, the DSL's own cache on disk hands on.
:mod:`opgraft.ready.here` does it in this process, for impls that no worker can import.

Note [Who waits for whom]
No call waits. The thread that asks appends to a queue under a lock that nobody holds while waiting
for anything. Each worker process has a thread here, which sends it one request at a time and reads
the answer with a limit; that thread alone starts its process and waits for its end. A worker ends
when its standard input does, and the operating system kills it when that thread ends, so none stays
behind.
"""
