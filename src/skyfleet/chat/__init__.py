"""Words to tokens and back."""
