"""Kernels in CuteDSL for rows so long that a cluster of Hopper's blocks shares one.

Triton cannot reduce over the blocks of a cluster. Here every block of a cluster holds a slice of a
row in shared memory, and the blocks exchange their partial sums of the row: so a row is read once.

Every width is a function of its own; the number of rows and their distance are run-time values.
"""
