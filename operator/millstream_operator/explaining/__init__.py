"""Explaining: plans as text, for `millstream plan`: tables, memory bars, comparisons and diffs. Pure."""
