"""Which dispatch keys an override can be at."""

#: Dense backends: the keys at which a native kernel lives below autograd and autocast. An override
#: belongs there, because everything above (derivatives, casting, functorch) then goes on working.
BACKEND_KEYS = (
    *("CPU", "CUDA", "HIP", "XLA", "MPS", "IPU", "XPU", "HPU", "VE", "Lazy", "MTIA", "MAIA"),
    *("PrivateUse1", "PrivateUse2", "PrivateUse3"),
)
