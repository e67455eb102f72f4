"""EAGLE-1 heads (Li et al. 2024, arXiv 2401.15077): one decoder layer over a target's own hidden states."""
