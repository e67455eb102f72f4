"""The folder that is made: published formats, its files, and how it appears whole."""
