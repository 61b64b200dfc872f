"""What thinks: a decoder's weights and its forward pass."""
