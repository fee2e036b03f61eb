"""LayerNorm: overrides for ``aten::native_layer_norm`` and its backward."""
