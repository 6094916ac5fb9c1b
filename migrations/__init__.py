"""The schema of the book, one step per file; imports no other jayrun code."""
