"""RMSNorm: overrides for ``aten::_fused_rms_norm`` and its backward."""
