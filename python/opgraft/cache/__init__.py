"""Compiled kernels on disk, which one process makes and others load.

Note [Concurrency of the kernel cache]
A kernel is two files: the library, whose name contains the hash of its content, and an entry that
names it. Both are written under a temporary name and renamed, the entry last, and nobody ever
writes to a file that has its name. So no reader needs a lock, on network file systems neither: it
finds an entry that is whole or none, and a library that has the hash or none. Two processes that
make the same kernel at a time both write it; the later entry counts, and either is right. What is
removed while it is read is made once more.
"""
