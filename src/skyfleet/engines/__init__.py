"""Who speaks: tokens in, tokens out."""
