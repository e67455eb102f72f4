"""Builders that several test areas share."""
