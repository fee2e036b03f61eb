"""Compiled kernels on disk, which one process makes and others load.

Note [Concurrency of the kernel cache]
What is kept is an entry, and the files that it names: libraries, cubins. A file's name is the hash
of its content, so entries share files. All are written under a temporary name and renamed, the
entry last, and nobody ever writes to a file that has its name. So no reader needs a lock, on
network file systems neither: it finds an entry that is whole or none, and a file that has the hash
or none. Two processes that make the same entry at a time both write it; the later one counts, and
either is right. What is removed while it is read is made once more.
"""
