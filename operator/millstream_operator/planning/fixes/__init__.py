"""Fixes: the nearest changes that make an infeasible spec feasible. Pure."""
