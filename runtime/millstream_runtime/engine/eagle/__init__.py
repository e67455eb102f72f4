"""An EAGLE head next to its target: weights, pools, and what it computes."""
