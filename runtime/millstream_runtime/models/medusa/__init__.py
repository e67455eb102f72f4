"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each guesses one of the next tokens from one hidden state."""
