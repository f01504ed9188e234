"""Trimaran trains any PyTorch model on one device or on thousands, with the same result."""
