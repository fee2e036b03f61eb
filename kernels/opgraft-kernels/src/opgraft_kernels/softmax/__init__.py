"""Softmax and log-softmax, forward and backward, over any dimension."""
