"""Cross-entropy as one op, of logits and class indices."""
