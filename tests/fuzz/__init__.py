"""Random programs of overridden ops, run by stock PyTorch and with overrides, and compared.

`python -m tests.fuzz --programs 10000`; `programs` makes and runs them, `grafts` registers
overrides at random, `campaign` compares.
"""
