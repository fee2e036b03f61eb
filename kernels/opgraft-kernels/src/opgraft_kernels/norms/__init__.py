"""RMSNorm and LayerNorm: overrides for the ops that ``F.rms_norm`` and ``F.layer_norm`` call."""
