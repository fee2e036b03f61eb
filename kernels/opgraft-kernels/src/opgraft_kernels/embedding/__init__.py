"""The gradient of an embedding's weight."""
