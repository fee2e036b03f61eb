"""Attention: overrides for the ops that ``F.scaled_dot_product_attention`` reaches, and for
``aten::_flash_attention_forward``, which variable-length attention calls."""
